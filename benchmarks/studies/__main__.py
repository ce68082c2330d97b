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
import re
import sys
from pathlib import Path

from benchmarks.studies.cells import STUDIES
from benchmarks.studies.measure import LOCAL_CLIENTS, Bench, measure
from benchmarks.studies.report import write_report
from benchmarks.studies.rows import Rows
from espalier.data.public_text import public_samples
from espalier.data.samples import samples_sha256
from espalier.errors import EspalierError, InputError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened import open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import parse
from espalier.storage.blobs import sha256

PUBLISHED = "published"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--model", required=True, help="directory of a Hugging Face model")
    parser.add_argument(
        "--private", required=True, help="text file that is dealt out to the clients"
    )
    parser.add_argument(
        "--text",
        action="append",
        required=True,
        metavar="NAME=FILE",
        help="public text to evaluate on",
    )
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument(
        "--max-samples", type=int, default=64, help="samples of each public text; 0: all"
    )
    parser.add_argument(
        "--ties", default="magnitude", choices=("magnitude", "index", "random", PUBLISHED),
        help="see fedprllm.ties; published: the rules of the paper's code, random in layers, by index in rows and columns",
    )  # fmt: skip
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("docs/studies"))
    return parser.parse_args()


def _seeds(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(
            f"--seeds {text!r}: give whole numbers with commas between them, for instance 0,1,2"
        )
    return [int(seed) for seed in text.split(",")]


def main() -> int:
    """Run the missing parts of a study, and write its report."""
    given = _arguments()
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
    try:
        settings = parse(common)
        seeds = _seeds(given.seeds)
        if not Path(given.private).is_file():
            raise InputError(f"--private {given.private}: is no file")
        model = open_model(settings.model)
        texts = public_samples(settings.evaluation, model.encode)
        bench = Bench(
            BlockStream(model, computing := set_up(settings, Path())),
            texts,
            common,
            given.ties == PUBLISHED,
        )
        conditions = {
            "model": {
                "name": model.directory.name,
                "weights": model.plan.num_weights,
                "sha256": model.sha256,
            },
            "private": {
                "sha256": sha256(Path(given.private).read_bytes()),
                "bytes": Path(given.private).stat().st_size,
            },
            "texts": {
                name: {"samples": len(samples), "sha256": samples_sha256(samples)}
                for name, samples in texts.items()
            },
            "sequence_length": given.sequence_length,
            "ties": given.ties,
            "threads": given.threads,
            "device": computing.device.type,
            "local_clients": LOCAL_CLIENTS,
        }
        rows = Rows(given.out / f"{name}.csv", conditions)
        cells = list(STUDIES[given.study](seeds))
        measure(bench, cells, rows)
    except EspalierError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    write_report(given.study, rows, given.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
