"""The ``espalier`` command.

    espalier run                                  run the demo
    espalier run fedprllm fedprllm.sparsity=0.6   run a preset of conf/ with other settings
    espalier run num-clients=16                   simulate any number of clients
    espalier run two-sites --superlink HOST:9093  run on the sites connected to a SuperLink
    espalier plan fedsoda model=config-only       estimate bytes, memory, disk and time of a run
    espalier status runs/*                        show the state of runs
    espalier app                                  show the folder of the Flower app
    espalier check-node 'site="a" data-path="notes.txt"' two-sites
                                                  check a --node-config for a run
    espalier node --superlink HOST:9092 --node-config 'site="a"'
                                                  start a warm SuperNode with the installed program
    espalier keys DIRECTORY --server HOST --site a --site b
                                                  make TLS certificates and a key pair per site
    espalier release STATE-DIR                    list, release or refuse replies awaiting approval
    espalier check-log STATE-DIR                  verify the log of what left a site

``espalier run`` does what ``flwr run .`` does, and in addition: it starts as many nodes as there
are clients, returns an exit code that says whether the run completed, retries if Ray fails to
start, resolves paths from the current directory, checks all local files before anything is started,
and uses a SuperLink that never mixes two copies of the project.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

import espalier
from espalier.cli.approval import COMMANDS, add_commands, run_approval
from espalier.cli.check_node import check_node
from espalier.cli.node import run_node
from espalier.cli.plan import add_plan, plan
from espalier.cli.run_status import add_status, show_status
from espalier.errors import FLOWER_REPORTS_IT_TOO, EspalierError, InputError
from espalier.flower.control_api import warn_of_answering_control_api, warn_of_open_control_api
from espalier.flower.incomplete_bundle import is_incomplete, unshared_app, where_to_mend
from espalier.launch.app_folder import find_app, installed_app
from espalier.launch.app_process import run_in_app
from espalier.launch.child_processes import INTERRUPTS, interrupted_later, uninterrupted
from espalier.launch.configuration import configuration
from espalier.launch.reachability import require_address
from espalier.launch.setting_words import explain_options
from espalier.launch.superlink import (
    RAY_DID_NOT_START,
    SuperLink,
    SuperLinkLost,
    own_superlink,
    running_superlink,
)
from espalier.launch.watched_run import COMPLETED, WatchedRun

BEFORE_START = "server_app.preflight"
"""Module of the app that opens all that a simulation reads."""
RAY_STARTS = 3
"""Maximum number of starts of a simulation, if Ray fails to start."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns
    -------
    0 if the run completed or the node is fine, 1 if it failed, 2 for a wrong request, 130 after an
    interrupt.
    """
    parser = _parser()
    # argcomplete sets this variable when a shell asks for completions.
    if "_ARGCOMPLETE" in os.environ:
        from espalier.cli.completion import complete

        complete(parser)
    # Words may also follow options; ``parse_args`` would refuse that.
    given, further = parser.parse_known_args(arguments)
    if given.command == "node":
        return _node(given, further)
    takes_settings = given.command in ("run", "check-node", "plan")
    if unknown := [word for word in further if word.startswith("-") or not takes_settings]:
        words = sys.argv[1:] if arguments is None else arguments
        told = explain_options(unknown, words, _setting_keys()) if takes_settings else ""
        parser.error(told or f"unrecognized arguments: {' '.join(unknown)}")
    if given.command is None:
        parser.print_help()
        return 0
    if given.command == "app":
        return _show_app()
    if given.command == "status":
        return show_status(installed_app(), given.directories)
    if given.command == "keys":
        return _keys(given)
    if given.command in COMMANDS:
        return _at_the_site(given)
    given.words += further
    for number in INTERRUPTS:
        # ``nohup`` makes a process ignore SIGHUP, which must stay so.
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    watched = WatchedRun(sys.argv[1:] if arguments is None else arguments)
    try:
        if getattr(given, "superlink", None) is not None:
            require_address(given.superlink)
        if given.command == "check-node":
            # By default the installed app: it is the program that the node would run.
            if given.superlink is not None:
                warn_of_answering_control_api(given.superlink, given.root_certificates)
            return check_node(
                find_app(given.app) if given.app else installed_app(),
                given.node_config,
                given.words,
            )
        app = find_app(given.app)
        if given.command == "plan":
            return plan(app, given.words, given.teraflops, given.megabits, measure=given.measure)
        config, settings = configuration(app, given.words, on_this_machine=given.superlink is None)
        if given.superlink is not None:
            warn_of_open_control_api(given.superlink)
            with running_superlink(given.superlink, given.root_certificates) as superlink:
                return _report(watched, *_run_whole(superlink, watched, app, config))
        _require_ray()
        print("opening the model and the clients' data", flush=True)
        if refused := run_in_app(app, BEFORE_START, config):
            if refused < 0:
                print(
                    f"espalier: the look at model and data was ended by signal {-refused}; is"
                    " memory short?",
                    file=sys.stderr,
                )
            return max(refused, 1)
        cpus = min(settings.threads, os.cpu_count() or 1)
        federation = (
            f"num-supernodes={settings.num_clients} client-resources-num-cpus={cpus} "
            f"client-resources-num-gpus={given.gpus_per_client}"
        )
        return _simulate(watched, app, config, federation)
    except EspalierError as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    except SuperLinkLost as lost:
        print(f"espalier: {lost}\nespalier: {watched.how_to_go_on()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if watched.completed:
            return 0
        if given.command == "check-node":
            print("\nespalier: interrupted; the node was not checked to the end", file=sys.stderr)
            return 130
        print(f"\nespalier: interrupted; {watched.how_to_go_on()}", file=sys.stderr)
        return 130


def _node(given: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a SuperNode; options that the command does not know go to ``flower-supernode``."""
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)
    try:
        return run_node(
            installed_app(), words, given.port, given.warm_seconds, given.most_idle_megabytes
        )
    except EspalierError as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _keys(given: argparse.Namespace) -> int:
    """Make keys and certificates, and print which folder is for which recipient."""
    from espalier.cli.keys import make_keys

    try:
        for line in make_keys(Path(given.directory), given.server, given.site, given.days):
            print(line)
    except EspalierError as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"espalier: keys: {error.filename or given.directory}: {error.strerror}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _at_the_site(given: argparse.Namespace) -> int:
    """Decide on replies that wait for approval, or check a log."""
    try:
        return run_approval(given)
    except EspalierError as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _show_app() -> int:
    """Print the folder of the app, for ``flwr run "$(espalier app)"``, and for presets to copy."""
    try:
        print(find_app(None))
    except EspalierError as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    return 0


def _setting_keys() -> list[str]:
    """Return the keys of a run's settings."""
    from espalier.settings.run import default_values

    return list(default_values())


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espalier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"espalier {espalier.__version__}")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser(
        "app",
        help="print the folder of the Flower app, with its packages, presets and pyproject.toml",
    )
    keys = commands.add_parser(
        "keys", help="make certificates for TLS and a key pair for each site; existing files stay"
    )
    keys.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="folder for the files; use the same folder again to add a site",
    )
    keys.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="HOST",
        help="name or address under which sites reach the server",
    )
    keys.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a site, as in its --node-config",
    )
    keys.add_argument(
        "--days",
        type=int,
        default=365,
        help="number of days for which the certificate of the server is valid; default 365",
    )
    node = commands.add_parser(
        "node", help="start a warm SuperNode that runs only the installed program; takes the options of flower-supernode",
        epilog="All further options are those of flower-supernode (flower-supernode --help): --superlink, --root-certificates, "
        "--auth-supernode-private-key, --node-config.",
    )  # fmt: skip
    node.add_argument(
        "--warm-seconds",
        type=float,
        default=900.0,
        help="seconds after which a worker without a task ends; default 900",
    )
    node.add_argument(
        "--most-idle-megabytes", type=int, default=0, metavar="N",
        help="memory that a worker may hold between tasks; above it, the worker drops its model, and ends if that "
        "is not enough; default 0: half of the machine's memory",
    )  # fmt: skip
    node.add_argument(
        "--port",
        type=int,
        default=0,
        help="loopback port on which the node hands out tasks; default: a free port",
    )
    run = commands.add_parser(
        "run", help="simulate a federation on this machine, or start a run on a SuperLink"
    )
    run.add_argument(
        "words",
        nargs="*",
        metavar="preset | key=value",
        help="a preset in conf/, and settings that differ from it",
    )
    check = commands.add_parser(
        "check-node",
        help="check a SuperNode's --node-config on its machine, for a given run",
    )
    check.add_argument(
        "node_config",
        metavar="NODE-CONFIG",
        help="the text of flower-supernode --node-config, in quotes",
    )
    check.add_argument(
        "words",
        nargs="*",
        metavar="preset | key=value",
        help="the run, as for espalier run; default: the demo",
    )
    add_commands(commands)
    add_status(commands)
    planned = add_plan(commands)
    for command in (run, check, planned):
        command.add_argument(
            "--app",
            help=(
                "a checkout of Espalier; default: this directory if it is one, else the installed app"
            ),
        )
    run.add_argument(
        "--gpus-per-client",
        type=float,
        default=0.0,
        help="fraction of a GPU for each simulated client",
    )
    run.add_argument(
        "--superlink",
        metavar="HOST:PORT",
        help="Control API of a running SuperLink; default: a simulation",
    )
    check.add_argument(
        "--superlink",
        metavar="HOST:PORT",
        help="address to which the node connects; warn if runs can be started there",
    )
    for command in (run, check):
        command.add_argument(
            "--root-certificates",
            metavar="FILE",
            help="root certificates of that SuperLink; default: no TLS",
        )
    return parser


def _require_ray() -> None:
    """Raise InputError without Ray, which runs simulated clients; images for sites have no Ray."""
    if find_spec("ray") is None:
        raise InputError(
            "Ray is not installed here, and simulated clients need it: `pip install -e .` brings it"
            " (README, 'Set up and run'); container images come without. With --superlink the run"
            " takes the sites that are connected there"
        )


def _simulate(watched: WatchedRun, app: Path, config: dict[str, Any], federation: str) -> int:
    """Run a simulation, and repeat it if Ray did not start."""
    for start in range(1, RAY_STARTS + 1):
        with own_superlink() as superlink:
            status, details, log = _run(
                superlink, watched, app, config, "--federation-config", federation
            )
        if status == COMPLETED or FLOWER_REPORTS_IT_TOO in log or not RAY_DID_NOT_START.search(log):
            break
        if start < RAY_STARTS:
            print(
                f"espalier: Ray did not start; trying again ({start} of {RAY_STARTS - 1})",
                file=sys.stderr,
            )
    return _report(watched, status, details, log)


def _run_whole(
    superlink: SuperLink, watched: WatchedRun, app: Path, config: dict[str, Any]
) -> tuple[str, str, str]:
    """Run on a shared SuperLink.

    If the program was installed only in part, the run is repeated once in a bundle of its own.
    """
    status, details, log = _run(superlink, watched, app, config)
    if status == COMPLETED or not is_incomplete(told := f"{log}\n{details}"):
        return status, details, log
    print(
        "espalier: the run's program was there only in part: another run was installing it, or an"
        " installation was interrupted. Trying again with a bundle of its own; so that other runs"
        f" find a whole one, remove, while none works, {where_to_mend(told)}",
        file=sys.stderr,
    )
    return _run(superlink, watched, unshared_app(app, superlink.folder), config)


def _report(watched: WatchedRun, status: str, details: str, log: str) -> int:
    """Return the exit code of a run that has ended, and print why it failed."""
    if status == COMPLETED:
        return 0
    print(f"espalier: the run ended as {status}", file=sys.stderr)
    if FLOWER_REPORTS_IT_TOO not in log:
        print(f"espalier: {details}\nespalier: {watched.how_to_go_on()}", file=sys.stderr)
    return 1


def _run(
    superlink: SuperLink, watched: WatchedRun, app: Path, config: dict[str, Any], *options: str
) -> tuple[str, str, str]:
    """Submit the run, show its log while it works, and return its status, details and log."""
    config_file = superlink.folder / "run-config.toml"
    config_file.write_text(tomli_w.dumps(_nest(config)))
    watched.directory = ""
    watched.status = ""
    watched.said_why = False
    run_id, interrupted = _submit(superlink, app, config_file, *options)
    lines: list[str] = []
    try:
        if interrupted:
            raise KeyboardInterrupt
        with closing(superlink.stream_log(run_id)) as log:
            for line in log:
                lines.append(line)
                watched.note(line)
                if not watched.said_why:
                    sys.stdout.write(line)
                    sys.stdout.flush()
        while not (status := superlink.status(run_id))[0].startswith("finished"):
            time.sleep(0.2)
        watched.status = status[0]
    except KeyboardInterrupt:
        _break_off(superlink, watched, run_id)
        raise
    return *status, "".join(lines)


def _submit(superlink: SuperLink, app: Path, config_file: Path, *options: str) -> tuple[str, bool]:
    """Submit a run; return its id and whether an interrupt arrived meanwhile.

    An interrupt during the submission would leave a run without a known id, so it is postponed.
    """
    # Our own SuperLink ends with all its runs, so that an interrupt does no harm.
    if superlink.process is not None:
        return superlink.start_run(app, config_file, *options), False
    try:
        with interrupted_later() as noted:
            return superlink.start_run(app, config_file, *options), bool(noted)
    except KeyboardInterrupt:
        told = (
            "whether the SuperLink took the run is not known; flwr ls shows its runs, flwr stop"
            " ends one"
        )
        print(f"\nespalier: {told}", file=sys.stderr)
        raise


def _break_off(superlink: SuperLink, watched: WatchedRun, run_id: str) -> None:
    """Stop a run on a shared SuperLink, unless it has already ended.

    Our own SuperLink ends with all that it started.
    """
    if superlink.process is not None or watched.status:
        return
    with uninterrupted(), suppress(EspalierError, SuperLinkLost):
        superlink.stop_run(run_id)
        watched.status = superlink.status(run_id)[0]


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        table, dot, name = key.partition(".")
        if dot:
            nested.setdefault(table, {})[name] = value
        else:
            nested[key] = value
    return nested


if __name__ == "__main__":
    sys.exit(main())
