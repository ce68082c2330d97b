"""Studies of federated LoRA on your own models and data.

    python -m benchmarks.tuning dolly   --model DIRECTORY --clients DIRECTORY --test FILE
    python -m benchmarks.tuning ranks   --model DIRECTORY --clients DIRECTORY --test FILE
    python -m benchmarks.tuning encoder --model DIRECTORY --train FILE --test FILE

``dolly`` and ``ranks`` need a language model and a directory with ``client_0.jsonl``,
``client_1.jsonl`` and so on, records of Dolly. ``encoder`` needs an encoder
(``benchmarks.tuning.pretrain_encoder`` makes a small one) and records of SST-2, which are
distributed to ten clients. Results go to ``docs/studies/tuning-<study>.csv`` setting by setting (an
interrupted study continues there), and finally to Markdown tables and a plot next to it. ``--set
KEY=VALUE`` changes a setting of the run.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import partition_plot
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import (
    add_arguments,
    chosen,
    exit_status,
    model_conditions,
    new_parser,
)
from benchmarks.tuning.partitions import (
    PARTITION_FIGURES,
    PARTITION_KEYS,
    PARTITIONS,
    plot_partitions,
)
from benchmarks.tuning.report import write_report
from benchmarks.tuning.studies import ALPHAS, FIGURES, KEYS, STUDIES, Bench, first_records
from espalier.data.partition import Partition
from espalier.errors import InputError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from espalier.storage.blobs import sha256

ENCODER_CLIENTS = 10


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.tuning", __doc__)
    parser.add_argument("study", choices=sorted(STUDIES))
    add_arguments(parser, "model set seeds threads device out", threads=2)
    parser.add_argument(
        "--clients", type=Path, help="directory of the clients' records, client_<number>.jsonl"
    )
    parser.add_argument("--train", type=Path, help="records that are dealt out to the clients")
    parser.add_argument("--test", type=Path, required=True, help="records of the public test items")
    parser.add_argument(
        "--records", type=int, default=200, help="of each client, the first in its file; 0: all"
    )
    return parser.parse_args()


def _files(given: argparse.Namespace) -> list[Path]:
    """Return the clients' files, or the one that is distributed.

    Raises
    ------
    InputError
        They do not exist.
    """
    if given.study == "encoder":
        files = [given.train] if given.train else []
    else:
        found = given.clients.glob("client_*.jsonl") if given.clients else []
        # Sort by length first, so that client_10 comes after client_9.
        files = sorted(found, key=lambda file: (len(file.name), file.name))
    wanted = (
        "--train FILE"
        if given.study == "encoder"
        else "--clients DIRECTORY with client_0.jsonl and so on"
    )
    if not files:
        raise InputError(f"{given.study}: needs {wanted}")
    if missing := [str(file) for file in (*files, given.test) if not file.is_file()]:
        raise InputError(
            f"{', '.join(missing)}: is no file; {given.study} needs {wanted}, and --test FILE"
        )
    return files


def _count_partitions(common: Mapping[str, Any], given: argparse.Namespace) -> None:
    """Record the first seed's items per client and class for each alpha, and plot them."""
    seed = given.seeds[0]
    records = Path(common["data.path"])
    conditions = {
        "task": common["task.name"], "seed": seed, "records": sha256(records.read_bytes()),
    }  # fmt: skip
    path = given.out / PARTITIONS
    rows = Rows(path.with_suffix(".csv"), PARTITION_KEYS, PARTITION_FIGURES, conditions)
    for alpha in ALPHAS:
        partition = Partition("dirichlet", common["num-clients"], alpha, seed)
        counts = partition_plot.counts_per_client(partition, str(records), common["task.name"])
        for client, count in enumerate(counts):
            for label, items in sorted(count.items()):
                cell = {"alpha": f"{alpha:g}", "client": client, "label": label}
                rows.add_all([(cell, {"items": items})])
    plot_partitions(rows, path)


def _run(given: argparse.Namespace, scratch: Path) -> None:
    study = STUDIES[given.study]
    files = _files(given)
    settings = {**study.settings, **chosen(given.set)}
    deals_out = given.study == "encoder"
    common = {
        **settings,
        "method": "fedpetuning",
        "model": given.model,
        "threads": given.threads,
        "device": given.device,
        "num-clients": ENCODER_CLIENTS if deals_out else len(files),
        "data.source": "files",
        "data.path": str(files[0]) if deals_out else first_records(files, given.records, scratch),
        "task.test-path": str(given.test),
    }
    checked = parse(common)
    model = open_model(checked.model)
    bench = Bench(model, set_up(checked, Path()), common, given.seeds)
    conditions = {
        "model": model_conditions(model, "parameters"),
        "settings": {"clients": common["num-clients"], **settings},
        "records": {file.name: sha256(file.read_bytes()) for file in (*files, given.test)},
        "records_per_client": None if deals_out else given.records,
        "threads": given.threads,
        "device": bench.computing.device.type,
    }
    path = given.out / f"tuning-{given.study}"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, conditions)
    study.work(bench, rows)
    write_report(study.title, study.tables, rows, conditions, path)
    if deals_out:
        _count_partitions(common, given)


def main() -> int:
    """Run the missing parts of a study, and write its report; return 2 after an error."""
    given = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        return exit_status(lambda: _run(given, Path(scratch)))


if __name__ == "__main__":
    sys.exit(main())
