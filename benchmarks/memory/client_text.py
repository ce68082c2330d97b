"""Cost of a client's calibration samples from one large file that clients share.

    python -m benchmarks.memory.client_text [--megabytes 1000] [--clients 8] [--model demo]
    [--plain]
    python -m benchmarks.memory.client_text --format parquet --megabytes 2000

The figures are seconds, memory and bytes read. The text is made on disk from seeded random words;
all passages differ. A Parquet file has a row per passage, and is not compressed. Three processes
follow: the first client draws its samples, which reads the file once for all clients; a second
client reads only its own passages; the first client repeats its work with a known number of tokens.
With ``--plain`` a client also does it with everything in memory, and the samples must be the same;
that takes about 15 times the size of the client's part plus 4 times the size of the file.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from espalier.data.client_text import client_samples
from espalier.data.partition import Partition
from espalier.data.passages import passages, split
from espalier.data.samples import samples_sha256
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.seeds import derive_seed
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse

MEGA = 1_000_000
VOCABULARY = 5000
LINES = 20_000
ROWS = 10_000
"""Number of rows in a row group of a Parquet file."""


def random_passages(size: int) -> Iterator[str]:
    """Yield passages of at least ``size`` characters in total.

    A passage has a number of its own and one to twelve lines of twelve words.
    """
    generator = random.Random(0)
    written = 0
    words = [
        "".join(generator.choices("etaoinshrdlucmfwypvbgk", k=generator.randint(2, 9)))
        for _ in range(VOCABULARY)
    ]
    lines = [" ".join(generator.choices(words, k=12)) for _ in range(LINES)]
    for number in itertools.count():
        if written >= size:
            return
        passage = f"{number} " + "\n".join(generator.choices(lines, k=generator.randint(1, 12)))
        written += len(passage)
        yield passage


def write_text(path: Path, size: int) -> None:
    """Write a text file with random passages."""
    with open(path, "w") as file:
        file.writelines(f"{passage}\n\n" for passage in random_passages(size))


def write_parquet(path: Path, size: int) -> None:
    """Write a Parquet file with a random passage in each row, in the column ``text``."""
    pyarrow = import_module("pyarrow")
    parquet = import_module("pyarrow.parquet")

    schema = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string())])
    passages_left = random_passages(size)
    number = 0
    with parquet.ParquetWriter(path, schema, compression="none") as writer:
        while rows := list(itertools.islice(passages_left, ROWS)):
            numbers = range(number, number + len(rows))
            writer.write_table(pyarrow.table([numbers, rows], schema=schema))
            number += len(rows)


WRITERS = {"text": write_text, "parquet": write_parquet}


def plain_samples(settings: RunSettings, model: OpenedModel, client: int) -> Tensor:
    """Return a client's calibration samples, with file, passages and tokens in memory."""
    data = settings.data
    whole = list(passages(Path(data.path).read_text()))
    partition = Partition("iid", settings.num_clients, data.alpha, settings.seed)
    own, _ = split(partition.select(client, whole))
    tokens = torch.tensor(model.encode("\n\n".join(own)), dtype=torch.int64)
    size = data.sequence_length
    generator = torch.Generator().manual_seed(
        derive_seed(settings.seed, "calibration", client=client)
    )
    available = len(tokens) // size
    offset = int(torch.randint(len(tokens) - available * size + 1, (1,), generator=generator))
    drawn = torch.randperm(available, generator=generator)[: data.num_samples].tolist()
    return torch.stack([tokens[offset + size * number :][:size] for number in drawn])


def measure(
    path: Path, clients: int, name: str, client: int, plain: bool
) -> dict[str, float | str]:
    """Return seconds, added peak memory, bytes read and a hash of the samples, in this process."""
    model = open_model(name)
    model.encode("the tokenizer is there")
    settings = parse(
        {"model": name, "num-clients": clients, "data.source": "files", "data.path": str(path)}
    )
    before = _memory("VmRSS")
    read = _bytes_read()
    started = time.monotonic()
    samples = (
        plain_samples(settings, model, client)
        if plain
        else client_samples(settings, simulated_node(), model.encode, client)
    )
    seconds = time.monotonic() - started
    return {
        "seconds": seconds,
        "memory": (_memory("VmHWM") - before) / MEGA,
        "read": (_bytes_read() - read) / MEGA,
        "sha256": samples_sha256(samples),
    }


def _memory(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what one large file costs each simulated client")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--format", choices=WRITERS, default="text")
    parser.add_argument("--plain", action="store_true", help="with everything in memory too")
    parser.add_argument("--client", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain and given.format != "text":
        parser.error("--plain reads a text file; leave out --format")
    return given


def main() -> None:
    """Make the file, and print a line per process."""
    given = _arguments()
    if given.client >= 0:
        print(
            json.dumps(measure(given.file, given.clients, given.model, given.client, given.plain))
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"text.{given.format.replace('text', 'txt')}"
        WRITERS[given.format](path, given.megabytes * MEGA)
        print(f"{path.name}: {path.stat().st_size / MEGA:.0f} MB", flush=True)
        _run_clients(given, path)


def _run_clients(given: argparse.Namespace, path: Path) -> None:
    """Run each client in a process of its own; exit if two runs of one drew other samples."""
    words = [sys.executable, "-m", "benchmarks.memory.client_text", "--file", str(path)]
    words += ["--model", given.model, "--clients", str(given.clients)]
    environment = {**os.environ, "ESPALIER_STATE_DIR": str(path.parent / "state")}
    hashes: dict[int, set[object]] = {}
    rounds: list[tuple[int, str, list[str]]] = [
        (0, "first client", []),
        (1, "second client", []),
        (0, "first client again", []),
    ]
    for client, what, more in [*rounds, *([(0, "plain", ["--plain"])] if given.plain else [])]:
        command = [*words, "--client", str(client), *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        hashes.setdefault(client, set()).add(found["sha256"])
        print(
            f"{what}: {found['seconds']:.1f} s, {found['memory']:.0f} MB of memory,"
            f" {found['read']:.0f} MB read",
            flush=True,
        )
    if any(len(found) > 1 for found in hashes.values()):
        sys.exit("the samples of one client differ")


if __name__ == "__main__":
    main()
