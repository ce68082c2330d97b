"""Study of aggregation rules with bad clients.

    python -m benchmarks.robust --seeds 0
    python -m benchmarks.robust --model DIRECTORY --path FILE --text NAME=FILE --method fedpetuning

Of eight clients, none to three send poison in every round: sign-flipped, scaled or random tensors,
sums and scores, inverted or random votes, votes of ones. Each attack runs with each aggregation
rule that the method has. Without ``--path``, the clients' text and the evaluation text are built
in: the source code of Python's standard library for tuning, and Python's documentation for pruning.
Results go to ``docs/studies/robust-<name>.csv`` row by row, so an interrupted study continues, and
finally to a page next to it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.reporting.rows import Rows
from benchmarks.robust.study import FIGURES, KEYS, SUBJECTS, cells, measure, write_report
from benchmarks.smaller.bench import Bench
from benchmarks.study_command import (
    add_arguments,
    chosen,
    exit_status,
    model_conditions,
    new_parser,
    text_conditions,
)
from espalier.data.public_text import public_samples
from espalier.errors import InputError
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse

BUILT_IN = {**dict.fromkeys(SUBJECTS, "documentation"), "fedpetuning": "code"}
"""Text of the clients and of the evaluation by method, if no file is named."""


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.robust", __doc__)
    add_arguments(parser, "set seeds threads work out", work=Path("runs/robust"))
    parser.add_argument("--model", default="demo", help="directory of a Hugging Face model")
    parser.add_argument("--path", type=Path, help="text that is dealt out to the clients")
    parser.add_argument("--text", metavar="NAME=FILE", help="evaluation text, with --path")
    parser.add_argument("--method", action="append", choices=sorted(SUBJECTS), help="default: all")
    parser.add_argument("--bad", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--samples", type=int, default=8, help="calibration samples per client")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--max-samples", type=int, default=24, help="of the evaluation text")
    return parser.parse_args()


def _common(given: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the settings of all runs of a method."""
    data: dict[str, Any] = {"data.source": BUILT_IN[method]}
    text = BUILT_IN[method]
    if given.path:
        data = {"data.source": "files", "data.path": str(given.path.absolute())}
        text = given.text
    samples = {} if method == "fedpetuning" else {"data.num-samples": given.samples}
    return {
        "model": given.model,
        "threads": given.threads,
        **data,
        **samples,
        "data.sequence-length": given.sequence_length,
        "evaluation.texts": text,
        "evaluation.sequence-length": given.sequence_length,
        "evaluation.max-samples": given.max_samples,
        "evaluation.local-baseline": False,
        "evaluation.centralized": "off",
    }


def _work(given: argparse.Namespace) -> None:
    if (given.path is None) != (given.text is None):
        raise InputError("--path and --text belong together: name both, or neither")
    if not 0 <= min(given.bad) <= max(given.bad) <= 3:
        raise InputError(f"--bad {given.bad}: choose numbers from 0 to 3")
    methods = given.method or list(SUBJECTS)
    model = open_model(given.model)
    texts: dict[str, Tensor] = {}
    for method in methods:
        run = parse({"method": method, **_common(given, method)})
        texts |= public_samples(run.evaluation, model.encode)
    conditions = {
        "model": model_conditions(model, "weights"),
        "source": given.path.name if given.path else "the built-in texts",
        "texts": text_conditions(texts),
        "samples": given.samples,
        "sequence_length": given.sequence_length,
        "threads": given.threads,
        "set": chosen(given.set),
    }
    path = given.out / f"robust-{model.directory.name}"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, conditions)
    # Numbers of bad clients come last in the order, so that a study cut short has all methods.
    for seed in given.seeds:
        for bad in sorted(set(given.bad)):
            for method in methods:
                bench = Bench(
                    _common(given, method), given.model, (), [seed], given.work.absolute()
                )
                measure(bench, rows, cells([seed], [method], [bad]), chosen(given.set))
    write_report(rows, conditions, path)
    print(f"written      {path}.md")


def main() -> int:
    """Do the missing runs and write the page; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
