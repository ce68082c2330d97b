"""Studies of FedPrLLM's paper on your own model and texts.

    python -m benchmarks.studies table-1 --model DIRECTORY --private FILE --text NAME=FILE --text
    NAME=FILE

The private text is distributed to the clients; every model is evaluated on the evaluation texts.
Results go to ``docs/studies/<study>.csv`` cell by cell (an interrupted study continues there), and
finally to a Markdown table and a plot next to it. ``table-1`` and ``table-4`` are the paper's
tables 1 to 3 and 4 and 8, ``figure-2`` and ``figure-3`` its figures. With 64 clients, three seeds
and a model of 7 M parameters, each takes half an hour on one core.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.studies.cells import STUDIES
from benchmarks.studies.measure import LOCAL_CLIENTS, Bench, measure
from benchmarks.studies.report import write_report
from benchmarks.studies.rows import Rows
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

PUBLISHED = "published"


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.studies", __doc__)
    parser.add_argument("study", choices=sorted(STUDIES))
    add_arguments(
        parser, "model text sequence-length max-samples seeds threads device out", max_samples=64
    )
    parser.add_argument(
        "--private", required=True, help="text file that is dealt out to the clients"
    )
    parser.add_argument(
        "--ties", default="magnitude", choices=("magnitude", "index", "random", PUBLISHED),
        help=(
            "see fedprllm.ties; published: the rules of the paper's code, random in layers, by"
            " index in rows and columns"
        ),
    )  # fmt: skip
    return parser.parse_args()


def _work(given: argparse.Namespace) -> None:
    """Run the missing parts of a study, and write its report."""
    common = {
        "model": given.model,
        "fedprllm.ties": "magnitude" if given.ties == PUBLISHED else given.ties,
        "threads": given.threads,
        "device": given.device,
        "data.source": "files",
        "data.path": given.private,
        "data.sequence-length": given.sequence_length,
        "evaluation.texts": ",".join(given.text),
        "evaluation.sequence-length": given.sequence_length,
        "evaluation.max-samples": given.max_samples,
    }
    name = given.study if given.ties == "magnitude" else f"{given.study}-ties-{given.ties}"
    settings = parse(common)
    if not Path(given.private).is_file():
        raise InputError(f"--private {given.private}: is no file")
    model = open_model(settings.model)
    texts = public_samples(settings.evaluation, model.encode)
    computing = set_up(settings, Path())
    bench = Bench(BlockStream(model, computing), texts, common, given.ties == PUBLISHED)
    conditions = {
        "model": model_conditions(model, "weights"),
        "private": {
            "sha256": sha256(Path(given.private).read_bytes()),
            "bytes": Path(given.private).stat().st_size,
        },
        "texts": text_conditions(texts),
        "sequence_length": given.sequence_length,
        "ties": given.ties,
        "threads": given.threads,
        "device": computing.device.type,
        "local_clients": LOCAL_CLIENTS,
    }
    rows = Rows(given.out / f"{name}.csv", conditions)
    measure(bench, list(STUDIES[given.study](given.seeds)), rows)
    write_report(given.study, rows, given.out / name)


def main() -> int:
    """Run a study; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
