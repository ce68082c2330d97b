"""Commands that use the result of a run: ``espalier eval`` and ``espalier chat``."""

import argparse

from espalier.cli import Commands
from espalier.errors import InputError
from espalier.launch.app import installed_app, run_in_app, run_in_terminal
from espalier.launch.child_processes import take_interrupts

SEEDS = 2**63
"""Number of seeds that PyTorch accepts."""


def add_use(commands: Commands) -> None:
    """Add the commands to the parser."""
    _add_eval(commands)
    _add_chat(commands)


def _add_model(
    parser: argparse.ArgumentParser,
    metavar: str = "RUN",
    described: str = "run directory, as printed by the run",
) -> None:
    """Add the options that say which model is used, and where it works."""
    parser.add_argument("run", metavar=metavar, help=described)
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="base model, if it is no longer where the run found it: directory or owner/name",
    )
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: auto"
    )


def _add_eval(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="evaluate the result of a run with lm-evaluation-harness (extra lm-eval)",
        epilog="The scores are also stored in lm_eval.json of the run directory.",
    )
    _add_model(parser)
    parser.add_argument(
        "--tasks", required=True, metavar="TASK,...", help="tasks, for example arc_easy,hellaswag"
    )
    parser.add_argument(
        "--client", action="append", default=[], metavar="CLIENT",
        help="evaluate the own model of this client, by number or name (SFT-P, FedSpine)",
    )  # fmt: skip
    parser.add_argument("--with-base", action="store_true", help="evaluate the base model too")
    parser.add_argument(
        "--data", action="append", default=[], metavar="TASK=FILE",
        help="JSON Lines with the records of a task, instead of its data on the hub",
    )  # fmt: skip
    parser.add_argument(
        "--include-path", action="append", default=[], metavar="DIRECTORY",
        help="directory with task definitions (YAML) of your own",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of a task")
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before an item; default: the task's"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    parser.set_defaults(execute=_eval)


def _eval(args: argparse.Namespace) -> int:
    take_interrupts()
    for name, least in (("limit", 1), ("num_fewshot", 0), ("batch_size", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    tasks = list(dict.fromkeys(task for task in args.tasks.split(",") if task))
    if not tasks:
        raise InputError(f"--tasks {args.tasks}: names no task; write for example arc_easy")
    document = {
        "run": args.run,
        "base": args.base,
        "device": args.device,
        "clients": args.client,
        "with_base": args.with_base,
        "tasks": tasks,
        "include": args.include_path,
        "data": dict(_data_file(text) for text in args.data),
        "limit": args.limit,
        "num_fewshot": args.num_fewshot,
        "batch_size": args.batch_size,
    }
    return run_in_app(installed_app(), "espalier.results.use.harness", document)


def _data_file(text: str) -> tuple[str, str]:
    task, equals, file = text.partition("=")
    if not equals or not file:
        raise InputError(f"--data {text}: write TASK=FILE")
    return task, file


def _add_chat(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to the result of a run in the terminal",
        epilog="In the chat, /clear forgets the conversation and /quit or Ctrl-D ends it.",
    )
    _add_model(parser, "RUN | MODEL", "run directory, or directory of a model")
    parser.add_argument(
        "--client", metavar="CLIENT", help="own model of this client, by number or name"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show the answers of the original model, the base model and the result",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="answer this text once and end")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N",
        help="maximum length of an answer; default: 256",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T",
        help="randomness of the answers; default: 0, always the most likely token",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.set_defaults(execute=_chat)


def _chat(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    if not 0 <= args.temperature <= 100:
        raise InputError(f"--temperature {args.temperature:g}: must be from 0 to 100")
    if not 0 <= args.seed < SEEDS:
        raise InputError(f"--seed {args.seed}: must be from 0 to {SEEDS - 1:,}")
    keys = (
        "run", "base", "device", "client", "compare", "prompt", "system", "max_new_tokens",
        "temperature", "seed",
    )  # fmt: skip
    document = {key: getattr(args, key) for key in keys}
    return run_in_terminal(installed_app(), "espalier.results.use.chat_command", document)
