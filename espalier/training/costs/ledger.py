"""Table of a client's costs of tuning, in Markdown: parameters, bytes on the wire and memory.

No weights and no network are needed. Examples:

    python -m espalier.training.costs.ledger
    python -m espalier.training.costs.ledger --model llama3-8b --model DIRECTORY --rank 8
    python -m espalier.training.costs.ledger --targets attn.q,attn.k --layers 29-31

A model is a known shape (by default all of them) or a directory with a ``config.json``. A MiB has
1,048,576 bytes.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import get_args

import torch

from espalier.errors import EspalierError, InputError
from espalier.hf.nf4.matrices import bitsandbytes
from espalier.hf.whole.model import Base
from espalier.settings.federation import Payload
from espalier.settings.lora import LoraSettings
from espalier.settings.run import parse
from espalier.training.costs.account import Account, account
from espalier.training.costs.shapes import SHAPES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return 0, or 2 with a message on stderr after a wrong argument."""
    given = _arguments(arguments)
    with suppress(EspalierError):
        # Imported here first, because peft imports it too and could show its warnings.
        bitsandbytes()
    try:
        _require(given)
        found = [account(model, _lora(given), given.num_labels) for model in given.model or SHAPES]
        for lines in (trained_table(found), wire_table(found, given.payload, given.num_clients)):
            print("\n".join([*lines, ""]))
        lines = memory_table(found, given.base, DTYPES[given.dtype], given.batch_size, given.tokens)
        print("\n".join(lines))
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def trained_table(accounts: Sequence[Account]) -> list[str]:
    """Return the table of frozen and trained parameters and the fraction that is trained."""
    rows = []
    for one in accounts:
        ranks = sorted({adapter.rank for _, adapter in one.adapters})
        matrices = (
            f"{sum(map(len, one.adapters.blocks.values()))} of"
            f" {sum(len(block.linears) for block in one.plan.blocks)}"
        )
        frozen = f"{one.frozen:,}"
        trained = f"{one.trained:,}"
        rows.append(
            [one.model, frozen, matrices, ", ".join(map(str, ranks)), trained, f"{one.share:.4%}"]
        )
    return _table(
        ["model", "frozen parameters", "adapted matrices", "ranks", "trained parameters", "share"],
        rows,
    )


def wire_table(
    accounts: Sequence[Account], payloads: Sequence[Payload], num_clients: int
) -> list[str]:
    """Return the table of bytes per round that a client sends and receives, and that all send."""
    rows = []
    for one in accounts:
        for payload in payloads:
            size = sum(one.blob_bytes(payload).values())
            each = f"{size / one.trained:.3f}"
            rows.append(
                [
                    one.model,
                    payload,
                    f"{size:,}",
                    "0",
                    f"{size:,}",
                    each,
                    f"{num_clients * size / MIB:,.3f}",
                ]
            )
    later = "down, each later round"
    clients = f"{num_clients} clients up, MiB"
    return _table(
        [
            "model",
            "payload",
            "bytes up, each round",
            "down, round 1",
            later,
            "bytes per number",
            clients,
        ],
        rows,
    )


def memory_table(
    accounts: Sequence[Account],
    bases: Sequence[Base],
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
) -> list[str]:
    """Return the table of memory in MiB.

    Its columns are the frozen weights, the trained parameters and gradients (float32), AdamW's
    moments, and activations unless ``tokens`` is 0.

    Parameters
    ----------
    dtype : dtype of the forward pass and of unquantised weights over a base in NF4
    """
    rows = []
    for one in accounts:
        known: dict[torch.dtype, int] = {}
        for base, double, label in _held_as(bases, dtype):
            computing = dtype if base == "nf4" else DTYPES[base]
            parts = [
                one.frozen_bytes(base, computing, double),
                one.trained_bytes,
                one.trained_bytes,
                one.optimizer_bytes,
            ]
            if tokens:
                known[computing] = known.get(computing) or one.activation_bytes(
                    batch_size, tokens, computing
                )
                parts.append(known[computing])
            rows.append(
                [one.model, label, *(f"{part / MIB:,.1f}" for part in (*parts, sum(parts)))]
            )
    activations = [f"activations of {batch_size} x {tokens} tokens"] if tokens else []
    return _table(
        ["model", "base", "frozen, MiB", "trained", "gradients", "AdamW", *activations, "together"],
        rows,
    )


def _held_as(bases: Sequence[Base], dtype: torch.dtype) -> Iterator[tuple[Base, bool, str]]:
    for base in bases:
        if base == "nf4":
            name = str(dtype).removeprefix("torch.")
            yield base, True, f"nf4, double quantisation, {name}"
            yield base, False, f"nf4, {name}"
        else:
            yield base, True, base


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _lora(given: argparse.Namespace) -> LoraSettings:
    keys = {
        "rank": given.rank,
        "targets": given.targets,
        "layers": given.layers,
    }
    return parse(
        {"method": "fedpetuning", **{f"lora.{key}": value for key, value in keys.items()}}
    ).lora


def _require(given: argparse.Namespace) -> None:
    least = {"num_clients": 1, "batch_size": 1, "tokens": 0}
    for key, value in least.items():
        if getattr(given, key) < value:
            raise InputError(
                f"--{key.replace('_', '-')} {getattr(given, key)}: must be at least {value}"
            )
    if given.tokens == 1:
        raise InputError(
            "--tokens 1: nothing is predicted in one token; give more, or 0 to leave"
            " activations out"
        )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m espalier.training.costs.ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = LoraSettings()
    parser.add_argument(
        "--model", action="append", help=f"{', '.join(SHAPES)}, or a directory; may be repeated"
    )
    parser.add_argument("--rank", type=int, default=usual.rank)
    parser.add_argument(
        "--targets",
        default=usual.targets,
        help="canonical names, with commas between them, or 'all'",
    )
    parser.add_argument("--layers", default=usual.layers, help="for instance 0,4-7")
    parser.add_argument(
        "--payload", nargs="+", default=get_args(Payload), choices=get_args(Payload)
    )
    parser.add_argument("--base", nargs="+", default=get_args(Base), choices=get_args(Base))
    parser.add_argument(
        "--dtype", default="bfloat16", choices=sorted(DTYPES), help="of the forward pass over nf4"
    )
    parser.add_argument("--num-clients", type=int, default=10)
    parser.add_argument("--num-labels", type=int, default=2, help="classes of an encoder's head")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a forward pass")
    parser.add_argument(
        "--tokens", type=int, default=256, help="of a sequence; 0 leaves activations out"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
