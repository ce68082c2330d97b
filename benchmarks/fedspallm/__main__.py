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
from espalier.data.public_text import public_samples
from espalier.data.samples import samples_sha256
from espalier.errors import EspalierError, InputError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened import open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import parse
from espalier.storage.blobs import sha256


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fedspallm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--model", required=True, help="directory of a Hugging Face model")
    parser.add_argument(
        "--private",
        required=True,
        action="append",
        type=Path,
        help="text that is dealt out to the clients",
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
        "--max-samples", type=int, default=32, help="samples of each public text; 0: all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("docs/studies"))
    return parser.parse_args()


def main() -> int:
    """Run the missing parts of a study, and write its report."""
    given = _arguments()
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
    try:
        settings = parse(common)
        study = STUDIES[given.study]
        if missing := [str(file) for file in given.private if not file.is_file()]:
            raise InputError(f"--private {', '.join(missing)}: is no file")
        model = open_model(settings.model)
        texts = public_samples(settings.evaluation, model.encode)
        bench = Bench(
            BlockStream(model, set_up(settings, Path())), texts, common, given.private, given.seeds
        )
        conditions = {
            "model": {
                "name": model.directory.name,
                "weights": model.plan.num_weights,
                "sha256": model.sha256,
            },
            "private": {file.name: sha256(file.read_bytes()) for file in given.private},
            "texts": {
                name: {"samples": len(samples), "sha256": samples_sha256(samples)}
                for name, samples in texts.items()
            },
            "samples": SAMPLES,
            "sequence_length": given.sequence_length,
            "threads": given.threads,
            "device": bench.stream.computing.device.type,
        }
        path = given.out / f"fedspallm-{given.study}"
        rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, conditions)
        study.work(bench, rows)
    except EspalierError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    write_report(study, rows, conditions, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
