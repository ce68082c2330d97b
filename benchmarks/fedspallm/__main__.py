"""Studies of FedSpaLLM: the tables of its paper, and open questions, on your own model and texts.

    python -m benchmarks.fedspallm tables --model DIRECTORY --private FILE --text NAME=FILE --text
    NAME=FILE
    python -m benchmarks.fedspallm domains --model DIRECTORY --private FILE --private FILE --text
    NAME=FILE --text NAME=FILE
    python -m benchmarks.fedspallm sampling | rounds ...

The private text is distributed to the clients; in ``domains`` each file belongs to separate
clients. Every model is evaluated on the evaluation texts. Results go to
``docs/studies/fedspallm-<study>.csv`` row by row (an interrupted study continues there), and
finally to Markdown tables and a plot next to it.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.fedspallm.studies import SAMPLES, STUDIES, Bench
from benchmarks.reporting.perplexity_report import write_report
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import (
    add_arguments,
    exit_status,
    model_conditions,
    new_parser,
    text_conditions,
)
from espalier.data.public_text import public_samples
from espalier.errors import InputError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import parse
from espalier.storage.blobs import sha256


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.fedspallm", __doc__)
    parser.add_argument("study", choices=sorted(STUDIES))
    names = "model text sequence-length max-samples seeds threads device out"
    add_arguments(parser, names, threads=2)
    parser.add_argument(
        "--private",
        required=True,
        action="append",
        type=Path,
        help="text that is dealt out to the clients",
    )
    return parser.parse_args()


def _work(given: argparse.Namespace) -> None:
    """Run the missing parts of a study, and write its report."""
    common = {
        "method": "fedspallm",
        "model": given.model,
        "threads": given.threads,
        "device": given.device,
        "data.source": "files",
        "data.path": str(given.private[0]),
        "data.sequence-length": given.sequence_length,
        "evaluation.texts": ",".join(given.text),
        "evaluation.sequence-length": given.sequence_length,
        "evaluation.max-samples": given.max_samples,
    }
    settings = parse(common)
    study = STUDIES[given.study]
    if missing := [str(file) for file in given.private if not file.is_file()]:
        raise InputError(f"--private {', '.join(missing)}: is no file")
    model = open_model(settings.model)
    texts = public_samples(settings.evaluation, model.encode)
    stream = BlockStream(model, set_up(settings, Path()))
    bench = Bench(stream, texts, common, given.private, given.seeds)
    conditions = {
        "model": model_conditions(model, "weights"),
        "private": {file.name: sha256(file.read_bytes()) for file in given.private},
        "texts": text_conditions(texts),
        "samples": SAMPLES,
        "sequence_length": given.sequence_length,
        "threads": given.threads,
        "device": bench.stream.computing.device.type,
    }
    path = given.out / f"fedspallm-{given.study}"
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, conditions)
    study.work(bench, rows)
    write_report(study, rows, conditions, path)


def main() -> int:
    """Run a study; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
