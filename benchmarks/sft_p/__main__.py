"""Compare SFT-P's variants and other methods with a model and texts of one's own, and count what its paper prints.

    python -m benchmarks.sft_p variants --model DIRECTORY --private FILE --private FILE --text NAME=FILE --text NAME=FILE
    python -m benchmarks.sft_p latency ...
    python -m benchmarks.sft_p tables                # seconds, no weights, no network

Every private file is a client's, and the public text at its place is of its domain. Runs are kept in ``--work``, and a study
that was stopped goes on. Results go to ``docs/studies/sft-p-<study>.csv`` row by row, and at the end to Markdown tables and a
plot beside it.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.fedspallm.report import write_report
from benchmarks.fedspallm.rows import Rows
from benchmarks.sft_p import tables
from benchmarks.sft_p.studies import STUDIES, TRAINED
from benchmarks.smaller.studies import Bench
from espalier.corpora.public_text import public_windows
from espalier.corpora.windows import windows_sha256
from espalier.modeling.opened import open_model
from espalier.settings.mistakes import Mistake
from espalier.settings.run import parse
from espalier.storage.blobs import sha256


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sft_p", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="study", required=True)
    tables = commands.add_parser("tables", help="count what the paper prints, and what it does not; no weights")
    tables.add_argument("--out", type=Path, metavar="DIR", help="directory for tables.md and tables.csv")
    for name, study in STUDIES.items():
        _add_measured(commands.add_parser(name, help=study.title))
    return parser.parse_args()


def _add_measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="directory of a Hugging Face model")
    parser.add_argument("--private", required=True, action="append", type=Path, help="the text of one client")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="public text of its domain")
    parser.add_argument("--window-tokens", type=int, default=256, help="of windows that models are compared on")
    parser.add_argument("--max-windows", type=int, default=32, help="windows of each public text; 0: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/sft-p"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/studies"))


def main() -> int:
    """Do one study; 2 after a mistake, which is told on stderr."""
    given = _arguments()
    try:
        _count(given) if given.study == "tables" else _measure(given)
    except Mistake as mistake:
        print(f"{mistake}", file=sys.stderr)
        return 2
    return 0


def _count(given: argparse.Namespace) -> None:
    if given.out:
        tables.write(given.out)
    print(tables.report(), end="")


def _measure(given: argparse.Namespace) -> None:
    """Run a study, or what is missing of it, and write its report."""
    common = {
        "model": given.model,
        "threads": given.threads,
        "evaluation.texts": ",".join(given.text),
        "evaluation.window-tokens": given.window_tokens,
        "evaluation.max-windows": given.max_windows,
        "evaluation.local-only": False,
        "evaluation.centralized": "off",
    }
    if len(given.private) != len(given.text):
        raise Mistake(f"{len(given.private)} private texts and {len(given.text)} public ones; give one of each domain")
    settings, study = parse(common), STUDIES[given.study]
    model = open_model(settings.model)
    texts = public_windows(settings.evaluation, model.encode)
    conditions = {
        "model": {"name": model.directory.name, "weights": model.plan.num_weights, "sha256": model.sha256},
        "private": {file.name: sha256(file.read_bytes()) for file in given.private},
        "texts": {name: {"windows": len(windows), "sha256": windows_sha256(windows)} for name, windows in texts.items()},
        "windows": 32,
        "window_tokens": given.window_tokens,
        "training": TRAINED,
        "threads": given.threads,
    }
    path = given.out / f"sft-p-{given.study}"
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, conditions)
    study.work(Bench(common, given.model, given.private, given.seeds, given.work.absolute()), rows)  # type: ignore[arg-type]
    write_report(study, rows, conditions, path)


if __name__ == "__main__":
    sys.exit(main())
