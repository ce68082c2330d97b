"""The ``espalier`` command.

    espalier run                                  the demo
    espalier run fedprllm fedprllm.sparsity=0.6   a preset of conf/, and what differs from it
    espalier run num-clients=16                   any number of clients
    espalier run two-sites --superlink HOST:9093  on the sites that are connected to a SuperLink

It runs what ``flwr run .`` runs, and adds what that cannot: as many nodes as there are clients, an exit code that says
whether the run completed, another try when Ray fails to start, paths that mean what they mean where the command was
given, and a SuperLink that never mixes up two copies of the project.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from espalier.launch.app_folder import find_app
from espalier.launch.configuration import configuration
from espalier.launch.superlink import RAY_DID_NOT_START, SuperLink, own_superlink, running_superlink
from espalier.settings.mistakes import FLOWER_REPORTS_IT_TOO, Mistake

COMPLETED = "finished:completed"
RAY_STARTS = 3
"""How often a simulation is started in all, if Ray fails to start."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if the run completed, 1 if it failed, 2 if it was asked for wrongly."""
    parser = _parser()
    given, further = parser.parse_known_args(arguments)  # words may also follow options, which argparse alone refuses
    if unknown := [word for word in further if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    given.words += further
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        app = find_app(given.app)
        config, settings = configuration(app, given.words, on_this_machine=given.superlink is None)
        if given.superlink is not None:
            with running_superlink(given.superlink, given.root_certificates) as superlink:
                return _report(*_run(superlink, app, config))
        nodes = given.nodes or settings.num_clients
        if nodes < settings.num_clients:
            raise Mistake(f"--nodes {nodes}: fewer than num-clients = {settings.num_clients}")
        cpus = min(settings.threads, os.cpu_count() or 1)
        federation = (
            f"num-supernodes={nodes} client-resources-num-cpus={cpus} client-resources-num-gpus={given.gpus_per_client}"
        )
        return _simulate(app, config, federation)
    except Mistake as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="espalier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="simulate a federation on this machine, or start a run on a SuperLink")
    run.add_argument(
        "words", nargs="*", metavar="preset | key=value", help="a preset of conf/ and settings that differ from it"
    )
    run.add_argument("--app", help="the checkout of Espalier; default: this directory, or where it is installed from")
    run.add_argument("--nodes", type=int, help="simulated nodes; default: num-clients")
    run.add_argument("--gpus-per-client", type=float, default=0.0, help="share of a GPU that each simulated client holds")
    run.add_argument("--superlink", metavar="HOST:PORT", help="Control API of a running SuperLink; default: a simulation")
    run.add_argument("--root-certificates", metavar="FILE", help="certificates of that SuperLink; default: no TLS")
    return parser


def _simulate(app: Path, config: dict[str, Any], federation: str) -> int:
    """Run, and run again if Ray did not start."""
    for start in range(1, RAY_STARTS + 1):
        with own_superlink() as superlink:
            status, details, log = _run(superlink, app, config, "--federation-config", federation)
        if status == COMPLETED or FLOWER_REPORTS_IT_TOO in log or not RAY_DID_NOT_START.search(log):
            break
        if start < RAY_STARTS:
            print(f"espalier: Ray did not start; trying again ({start} of {RAY_STARTS - 1})", file=sys.stderr)
    return _report(status, details, log)


def _report(status: str, details: str, log: str) -> int:
    """The exit code of a run that has ended, and a word about it if it failed."""
    if status == COMPLETED:
        return 0
    print(f"espalier: the run ended as {status}", file=sys.stderr)
    if FLOWER_REPORTS_IT_TOO not in log:
        print(f"espalier: {details}", file=sys.stderr)
    return 1


def _run(superlink: SuperLink, app: Path, config: dict[str, Any], *options: str) -> tuple[str, str, str]:
    """Submit the run, show its log while it works, and return its status, details and log."""
    config_file = superlink.folder / "run-config.toml"
    config_file.write_text(tomli_w.dumps(_nest(config)))
    run_id = superlink.start_run(app, config_file, *options)
    lines: list[str] = []
    told = False
    try:
        for line in superlink.stream_log(run_id):
            lines.append(line)
            told = told or line.startswith(FLOWER_REPORTS_IT_TOO)
            if not told:
                sys.stdout.write(line)
                sys.stdout.flush()
        while not (status := superlink.status(run_id))[0].startswith("finished"):
            time.sleep(0.2)
    except KeyboardInterrupt:
        superlink.stop_run(run_id)
        raise
    return *status, "".join(lines)


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
