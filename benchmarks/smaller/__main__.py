"""Compare the methods that make models smaller or sparser, with a model and texts of one's own.

    python -m benchmarks.smaller recovery --model DIRECTORY --private FILE --private FILE --text NAME=FILE --text NAME=FILE
    python -m benchmarks.smaller latency ...

Every private file is a client's. ``recovery`` comes first: runs are kept in ``--work``, and a study that was stopped goes on.
Results go to ``docs/studies/smaller-<study>.csv`` row by row, and at the end to Markdown tables and a plot beside it.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.fedspallm.report import write_report
from benchmarks.fedspallm.rows import Rows
from benchmarks.smaller.studies import STUDIES, WINDOWS, Bench
from benchmarks.smaller.times import write_times
from espalier.corpora.public_text import public_windows
from espalier.corpora.windows import windows_sha256
from espalier.modeling.opened import open_model
from espalier.settings.mistakes import Mistake
from espalier.settings.run import parse
from espalier.storage.blobs import sha256


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smaller", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--model", required=True, help="directory of a Hugging Face model")
    parser.add_argument("--private", required=True, action="append", type=Path, help="the text of one client")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="public text to evaluate on")
    parser.add_argument("--window-tokens", type=int, default=256)
    parser.add_argument("--max-windows", type=int, default=32, help="windows of each public text; 0: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/smaller"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/studies"))
    return parser.parse_args()


def main() -> int:
    """Run a study, or what is missing of it, and write its report."""
    given = _arguments()
    common = {
        "model": given.model,
        "threads": given.threads,
        "data.window-tokens": given.window_tokens,
        "evaluation.texts": ",".join(given.text),
        "evaluation.window-tokens": given.window_tokens,
        "evaluation.max-windows": given.max_windows,
        "evaluation.local-only": False,
        "evaluation.centralized": "off",
    }
    try:
        settings, study = parse(common), STUDIES[given.study]
        model = open_model(settings.model)
        texts = public_windows(settings.evaluation, model.encode)
        conditions = {
            "model": {"name": model.directory.name, "weights": model.plan.num_weights, "sha256": model.sha256},
            "private": {file.name: sha256(file.read_bytes()) for file in given.private},
            "texts": {name: {"windows": len(windows), "sha256": windows_sha256(windows)} for name, windows in texts.items()},
            "windows": WINDOWS,
            "window_tokens": given.window_tokens,
            "threads": given.threads,
        }
        path = given.out / f"smaller-{given.study}"
        rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, conditions)
        study.work(Bench(common, given.model, given.private, given.seeds, given.work.absolute()), rows)  # type: ignore[arg-type]
    except Mistake as mistake:
        print(f"{mistake}", file=sys.stderr)
        return 2
    if given.study == "latency":
        write_times(study.title, rows, path)
    else:
        write_report(study, rows, conditions, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
