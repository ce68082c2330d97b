"""Random values and mutations, all from one generator, so that a seed identifies an input."""

import json
from random import Random
from typing import Any

WORDS = (
    "", " ", "a", "demo", "all", "none", "0", "-1", "1e999", "nan", "inf,1", "1,2,4", "2:4", "0:0",
    "9:4", "a=b=c", "=", ",", ",,", "attn.q", "attn.q,mlp.up", "attn.q=4", "0.attn.q=16", "0-9",
    "9-0", "0-9999,1", "documentation,code", "name=path", "own-text=x", "{client}",
    "{client}/{client}.txt", "{0}", "%s", "../..", "~", "~nobody-of-this-name/x", "/", "/dev/null",
    "\x00", "a\x00b", "a\nb", "\x1b[2J\x1b[1;1H", "\u202eabc", "\u2066", "\ufeff",
    "e\u0301\u0334\u0334\u0334", "äöü", "１,２", "٣", "\ud800", "x" * 70, "x" * 300, "x" * 5000,
    "/" + "x/" * 3000, "x" * 70_000, "9" * 5000,
)  # fmt: skip
NUMBERS: tuple[int | float, ...] = (
    0, 1, -1, 2, 3, 7, 8, 64, 255, 256, 1000, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 0.0,
    -0.0, 0.5, 1.0, 0.1, 1e-300, 1e-9, 1e9, 1e38, 1e308, -1e308, float("inf"), float("-inf"),
    float("nan"),
)  # fmt: skip


def word(random: Random) -> str:
    """Return a text, usually a hostile one."""
    text = random.choice(WORDS)
    if random.random() < 0.2:
        text += random.choice(WORDS)
    if random.random() < 0.1:
        text += "".join(
            chr(random.choice((random.randrange(128), random.randrange(0x300), 0x202E)))
            for _ in range(4)
        )
    return text


def scalar(random: Random) -> Any:
    """Return a value that a message can hold: number, bool, text, bytes, or a list of one type."""
    kind = random.randrange(10)
    if kind < 4:
        return random.choice(NUMBERS)
    if kind < 7:
        return word(random)
    if kind == 7:
        return random.random() < 0.5
    if kind == 8:
        return random.randbytes(random.choice((0, 1, 8, 100)))
    length = random.choice((0, 1, 2, 3, 50, 1000))
    if random.random() < 0.1:
        return [1] * 70_000
    whole = random.random() < 0.5
    return [
        random.choice(("a", "0" * 64, "\x1b")) if not whole else random.randrange(-2, 5)
        for _ in range(length)
    ]


def value(random: Random) -> Any:
    """Return a value as ``scalar`` does, or one that only files can hold.

    These are null, tables, mixed lists and huge numbers.
    """
    kind = random.randrange(8)
    if kind == 0:
        return random.choice((None, {}, [], {"a": 1}, [None, 1, "x"], 10**30, -(10**30)))
    return scalar(random)


def changed_bytes(random: Random, data: bytes) -> bytes:
    """Return the bytes with some of them flipped, removed, inserted, repeated or replaced."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        place = random.randrange(len(found) + 1)
        kind = random.randrange(5)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << random.randrange(8)
        elif kind == 1:
            del found[place : place + random.choice((1, 8, 1000))]
        elif kind == 2:
            found[place:place] = random.choice(
                (b"\0", b'"', b"9" * 30, b"[" * 40, b"{", b"}", b",", random.randbytes(8))
            )
        elif kind == 3:
            found += found[: random.choice((1, 8, 100))]
        else:
            found[place:] = random.randbytes(random.choice((0, 1, 8)))
    return bytes(found)


def changed_document(random: Random, document: Any) -> Any:
    """Return a JSON document with one value, at any depth, changed, added or removed."""
    copy = json.loads(json.dumps(document))
    at = copy
    while isinstance(at, dict | list) and at:
        key = random.choice(list(at)) if isinstance(at, dict) else random.randrange(len(at))
        if isinstance(at[key], dict | list) and at[key] and random.random() < 0.7:
            at = at[key]
            continue
        kind = random.randrange(4)
        if kind == 0:
            del at[key]
        elif kind == 1 and isinstance(at, dict):
            at[word(random)] = _json_value(random)
        else:
            at[key] = _json_value(random)
        break
    return copy if random.random() < 0.95 else _json_value(random)


def _json_value(random: Random) -> Any:
    found = value(random)
    return found.hex() if isinstance(found, bytes) else found


def document_bytes(random: Random, document: Any) -> bytes:
    """Return the file of a changed document, or a document's file with changed bytes."""
    if random.random() < 0.5:
        return json.dumps(changed_document(random, document)).encode("utf-8", "surrogatepass")
    if random.random() < 0.05:
        return random.choice(
            (b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b"\xff\xfe", b"", b"null", b"NaN")
        )
    return changed_bytes(random, json.dumps(document).encode())
