"""``espalier sweep``: runs over a grid of settings, one after the other, and their comparison."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from espalier.amounts import count
from espalier.cli import Commands
from espalier.cli.app_commands import add_words
from espalier.cli.run import add_gpus
from espalier.cli.run_request import RunRequest, run
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError, tell
from espalier.launch.app import find_app, run_in_app
from espalier.launch.child_processes import take_interrupts
from espalier.launch.configuration import configuration
from espalier.launch.run import BEFORE_START, NO_RAY
from espalier.launch.sweep_folder import (
    finished_of,
    locked_sweep,
    require_same_cells,
    words_of,
    write_record,
)
from espalier.launch.sweep_grid import Cell, cells_of

INTERRUPTED = 130
COMPARISONS = ("comparison.html", "comparison.csv")


def add_sweep(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "sweep",
        help="simulate runs over a grid of settings, one after the other, and compare them",
        epilog=(
            "A value that contains commas stands in quotes: 'lora.targets=\"attn.q,attn.v\",all'."
            " The same command again continues: completed cells are not run again, others are"
            " resumed."
        ),
    )
    add_words(parser, "presets and settings, each with one or more values: flap,llm-pruner key=a,b")
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIRECTORY",
        help="directory with a folder for each cell, and the comparison",
    )
    parser.add_argument(
        "--check", action="store_true", help="only check and list the cells, start none"
    )
    add_gpus(parser)
    parser.set_defaults(execute=sweep)


def sweep(args: argparse.Namespace) -> int:
    """Run all cells of the grid and compare them; return the exit code of the command.

    0 if all cells are completed, 1 if one failed, 130 after an interrupt.
    """
    take_interrupts()
    app = find_app(args.app)
    cells = cells_of(args.words)
    folder = at_home(args.out).absolute()
    configs = _checked_settings(app, cells, folder)
    if find_spec("ray") is None:
        raise InputError(NO_RAY)
    if args.check:
        record = require_same_cells(folder, configs)
        return _checked_inputs(app, folder, cells) or _list_cells(cells)
    with locked_sweep(folder):
        record = require_same_cells(folder, configs)
        if refused := _checked_inputs(app, folder, cells):
            return refused
        write_record(folder, record)
        failed = _run_all(args, folder, cells)
    if failed is None:
        tell("interrupted; the same command continues with the cells that are not completed")
        return INTERRUPTED
    return _conclude(app, folder, cells, failed)


def _list_cells(cells: Sequence[Cell]) -> int:
    print(f"{count(len(cells), 'cell')}:")
    for cell in cells:
        print(f"  {cell.name}: {' '.join(cell.words)}")
    return 0


def _checked_settings(
    app: Path, cells: Sequence[Cell], folder: Path
) -> dict[str, Mapping[str, Any]]:
    """Return the flat configuration of each cell by name.

    Raises
    ------
    InputError
        Settings of a cell are wrong, with the errors of all cells; or two cells have one name.
    """
    configs: dict[str, Mapping[str, Any]] = {}
    errors: dict[str, list[str]] = {}
    for cell in cells:
        if cell.name in configs:
            raise InputError(f"two cells have the name {cell.name}; write their values differently")
        words = [*cell.words, f"out-dir={folder / cell.name}"]
        try:
            configs[cell.name] = configuration(app, words, on_this_machine=True)[0]
        except EspalierError as error:
            errors.setdefault(str(error), []).append(cell.name)
    if errors:
        lines = [f"{_cells(names)}: {text}" for text, names in errors.items()]
        raise InputError("no cell was started\n" + "\n".join(lines))
    return configs


def _cells(names: Sequence[str]) -> str:
    return f"{'cell' if len(names) == 1 else 'cells'} {', '.join(names)}"


def _checked_inputs(app: Path, folder: Path, cells: Sequence[Cell]) -> int:
    """Open model and data of each cell that is left; return the exit code, 0 if all is well."""
    configs = {}
    for cell in cells:
        words = words_of(cell, folder / cell.name)
        if words is not None:
            configs[cell.name] = configuration(app, words, on_this_machine=True)[0]
    if not configs:
        return 0
    left = len(cells) - len(configs)
    done = f"; {left} are completed" if left else ""
    print(f"opening model and data of {count(len(configs), 'cell')}{done}", flush=True)
    refused = run_in_app(app, BEFORE_START, {"cells": configs})
    if refused < 0:
        tell(f"the check of the cells was ended by signal {-refused}; memory may be too small")
        return 1
    return refused


def _run_all(args: argparse.Namespace, folder: Path, cells: Sequence[Cell]) -> list[str] | None:
    """Run the cells that are not completed; return the failed ones, or None after an interrupt."""
    failed = []
    for number, cell in enumerate(cells, start=1):
        words = words_of(cell, folder / cell.name)
        title = f"cell {number} of {len(cells)}: {cell.name}"
        if words is None:
            print(f"{title} is completed", flush=True)
            continue
        print(f"\n{title}", flush=True)
        code = _run_one(args, words)
        if code == INTERRUPTED:
            return None
        if code:
            failed.append(cell.name)
    return failed


def _run_one(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run one cell as ``espalier run`` does; return its exit code."""
    request = RunRequest(["run", *words], words, args.app, args.gpus_per_client)
    try:
        return run(request)
    except EspalierError as error:
        tell(error)
    except Exception as error:
        # A fault in one cell must not end the others.
        tell(f"{type(error).__name__}: {error}")
    return 2


def _conclude(app: Path, folder: Path, cells: Sequence[Cell], failed: Sequence[str]) -> int:
    """Compare the cells, report the failed ones, and return the exit code."""
    runs = finished_of(folder, [cell.name for cell in cells])
    code = 0
    if len(failed) < len(cells):
        print("\ncomparison of all cells", flush=True)
        document = {
            "runs": [str(run) for run in runs.values()],
            "labels": list(runs),
            "out": [str(folder / name) for name in COMPARISONS],
            "metric": "",
            "against": "",
        }
        code = run_in_app(app, "espalier.results.comparison.command", document)
    for name in failed:
        again = (
            f"remove {folder / name} to start it again" if name in runs else "it had not started"
        )
        print(f"failed: {name} ({again})", file=sys.stderr)
    return 1 if failed else code
