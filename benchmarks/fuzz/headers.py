"""Safetensors blobs with changed bytes, or with headers of valid parts in wrong order or size."""

import json
import struct
from random import Random
from typing import Any

from benchmarks.fuzz.mutations import changed_bytes, word

SIZES: tuple[Any, ...] = (
    0,
    1,
    2,
    8,
    64,
    4096,
    2**31,
    2**63,
    -1,
    1.5,
    10**17,
    10**19,
    10**400,
    True,
    None,
    "8",
    [1],
    [],
)
DTYPES: tuple[Any, ...] = ("U64", "F32", "BF16", "U8", "I32", "TEXT", "", None, 7, ["U8"])


def changed_blob(random: Random, blob: bytes) -> bytes:
    """Return a blob with changed bytes or another header."""
    if random.random() < 0.4 and blob:
        return changed_bytes(random, blob)
    header = hostile_header(random)
    size = (
        len(header)
        if random.random() < 0.9
        else random.choice((0, len(header) - 1, len(header) + 1, 2**40, 2**63))
    )
    return struct.pack("<Q", max(0, size)) + header + bytes(random.choice((0, 1, 8, 64)))


def hostile_header(random: Random) -> bytes:
    """Return a text that more or less resembles a header."""
    kind = random.randrange(20)
    if kind == 0:
        return random.choice(
            (b"[" * 70_000, b"[" * 3000, b'{"a":' * 2000, b"9" * 6000, b"{" + b" " * 70_000 + b"}")
        )
    if kind == 1:
        many = {f"{number}": _entry(random, [0]) for number in range(random.choice((3, 300, 1100)))}
        return json.dumps(many, separators=(",", ":")).encode()
    at = [0]
    entries = {_name(random): _entry(random, at) for _ in range(random.choice((0, 1, 1, 2, 3)))}
    document: Any = entries if random.random() < 0.95 else list(entries.values())
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=random.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )
    text += b" " * (-len(text) % 8)
    return changed_bytes(random, text) if random.random() < 0.3 else text


def _entry(random: Random, at: list[int]) -> Any:
    # Half of the entries are valid.
    if random.random() < 0.5:
        start, at[0] = at[0], at[0] + 8
        return {"dtype": "U8", "shape": [2, 4], "data_offsets": [start, at[0]]}
    shape: Any = [random.choice(SIZES) for _ in range(random.choice((0, 1, 2, 9, 40)))]
    offsets: Any = [random.choice(SIZES) for _ in range(random.choice((2, 2, 2, 0, 1, 3)))]
    entry = {"dtype": random.choice(DTYPES), "shape": shape, "data_offsets": offsets}
    if random.random() < 0.2:
        entry[random.choice(list(entry))] = random.choice((None, 1, "x", {}, [[]]))
    if random.random() < 0.1:
        del entry[random.choice(list(entry))]
    others: tuple[Any, ...] = (None, [], "x", 1)
    return entry if random.random() < 0.95 else random.choice(others)


def _name(random: Random) -> str:
    return random.choice(("a", "attn.q.prune_mask", "__metadata__", word(random)))
