"""Payloads: the safetensors header is checked against the bytes that follow it."""

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as torch_save

from espalier.errors import EspalierError
from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.messages.records import from_record, to_record
from espalier.messages.tensor_blobs import (
    TensorSpec,
    pack_tensors,
    packed_bytes,
    tensor_specs,
    unpack_tensors,
    views,
)
from espalier.models.plan import block_key

SECRET = "Anna K., born 1961, diagnosis F32.1"


def blob_of(header: Any, data: bytes = b"", pad: str = "") -> bytes:
    """Return a blob made by hand: eight bytes of length, the header and the data.

    A header that is not text is written as safetensors writes it.
    """
    text = (
        header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    ).encode()
    text += pad.encode() if pad or isinstance(header, str) else b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "U64", shape: Any = (1,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# ----- reading and writing ------------------------------------------------------------------------


def test_a_blob_made_by_hand_is_read() -> None:
    blob = blob_of(
        {"b": entry("U64", (2,), (0, 16)), "a": entry("F32", (1, 2), (16, 24))}, bytes(range(24))
    )
    assert tensor_specs(blob) == {"b": TensorSpec("U64", (2,)), "a": TensorSpec("F32", (1, 2))}
    found = unpack_tensors(blob)
    assert found["b"].tolist() == [0x0706050403020100, 0x0F0E0D0C0B0A0908]
    assert found["a"].tolist() == [list(struct.unpack("<2f", bytes(range(16, 24))))]
    assert {name: array.tolist() for name, array in views(blob).items()} == {
        "b": found["b"].tolist(),
        "a": found["a"].tolist(),
    }


@pytest.mark.parametrize(("dtype", "torch_dtype"), TORCH_DTYPES.items())
def test_a_view_has_the_bits_of_the_tensor(dtype: str, torch_dtype: torch.dtype) -> None:
    numbers = torch.arange(-6, 6).view(3, 4).to(torch_dtype)
    found = views(torch_save({"x": numbers, "empty": torch.zeros(0, 2, dtype=torch_dtype)}))
    assert found["empty"].shape == (0, 2)
    assert found["x"].shape == (3, 4)
    assert found["x"].tobytes() == numbers.view(torch.uint8).numpy().tobytes()
    if dtype != "BF16":
        assert found["x"].tolist() == numbers.tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(
            st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=8
        ).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["<u8", "<i4", "<f4", "|u1"]),
            st.lists(st.integers(0, 4), min_size=1, max_size=3),
        ),
        max_size=4,
    )
)
def test_what_is_packed_comes_back(described: dict[str, tuple[str, list[int]]]) -> None:
    names = {"<u8": "U64", "<i4": "I32", "<f4": "F32", "|u1": "U8"}
    tensors = {name: np.ones(shape, dtype=dtype) for name, (dtype, shape) in described.items()}
    blob = pack_tensors(tensors)
    assert tensor_specs(blob) == {
        name: TensorSpec(names[dtype], tuple(shape)) for name, (dtype, shape) in described.items()
    }
    found = unpack_tensors(blob)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == tensor.tolist()


def test_zero_dimensional_tensor_stays_so() -> None:
    assert tensor_specs(pack_tensors({"a": np.array(1.5)}))["a"].shape == ()


def test_bytes_do_not_depend_on_insertion_order() -> None:
    one = np.arange(3)
    two = np.arange(4)
    assert pack_tensors({"x": one, "a": two}) == pack_tensors({"a": two, "x": one})


def test_a_view_with_gaps_is_packed_by_its_values() -> None:
    assert unpack_tensors(pack_tensors({"a": np.arange(6).reshape(2, 3).T}))["a"].tolist() == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]


@pytest.mark.parametrize(("dtype", "size"), [("U64", 8), ("BF16", 2), ("BOOL", 1), ("F32", 4)])
def test_bytes_of_a_tensor(dtype: str, size: int) -> None:
    assert TensorSpec(dtype, (3, 5)).num_bytes == 15 * size
    assert TensorSpec(dtype, ()).num_bytes == size
    assert TensorSpec(dtype, (3, 0)).num_bytes == 0


def test_bf16_is_described_without_a_numpy_dtype() -> None:
    assert tensor_specs(blob_of({"a": entry("BF16", (4,), (0, 8))}, bytes(8))) == {
        "a": TensorSpec("BF16", (4,))
    }


# ----- blobs that contradict their header ---------------------------------------------------------

MALFORMED = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "a header longer than the blob": struct.pack("<Q", 100) + b"{}",
    "a header of absurd length": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": blob_of("{"),
    "no UTF-8": struct.pack("<Q", 2) + b"\xff\xfe",
    "a list": blob_of([]),
    "deep nesting": blob_of("[" * 100_000),
    "an entry that is text": blob_of({"a": SECRET}),
    "no dtype": blob_of({"a": {"shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
    "an unknown dtype": blob_of({"a": entry("TEXT")}, bytes(8)),
    "a dtype that is a list": blob_of({"a": entry([SECRET])}, bytes(8)),
    "a shape of text": blob_of({"a": entry(shape=[SECRET])}, bytes(8)),
    "metadata": blob_of({"__metadata__": {"note": SECRET}, "a": entry()}, bytes(8)),
    "trailing bytes": blob_of({"a": entry()}, bytes(8) + SECRET.encode()),
    "trailing bytes and no tensor": blob_of({}, SECRET.encode()),
    "too few bytes": blob_of({"a": entry()}, bytes(7)),
    "bytes before the first tensor": blob_of({"a": entry(offsets=(8, 16))}, bytes(16)),
    "a gap between tensors": blob_of({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "tensors that overlap": blob_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "two tensors on the same bytes": blob_of({"a": entry(), "b": entry()}, bytes(8)),
    "a shape that needs more bytes": blob_of({"a": entry(shape=(2,))}, bytes(8)),
    "offsets of text": blob_of({"a": entry(offsets=("x", "y"))}, bytes(8)),
}


@pytest.mark.parametrize("blob", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_blob_is_refused_unquoted(blob: bytes) -> None:
    with pytest.raises(EspalierError) as caught:
        tensor_specs(blob)
    assert "Anna" not in str(caught.value)


@pytest.mark.parametrize("offsets", [[], [0]])
def test_offsets_that_are_no_pair_are_a_mistake(offsets: list[int]) -> None:
    with pytest.raises(EspalierError):
        tensor_specs(blob_of({"a": entry(offsets=offsets)}, bytes(8)))


HOSTILE = {
    "dimensions of thousands of digits": (
        '{"a":{"dtype":"U8","shape":[' + ",".join(["9" * 4200] * 10) + '],"data_offsets":[0,8]}}'
    ),
    "a megabyte of digits": (
        '{"a":{"dtype":"U8","shape":[' + ",".join(["9" * 4200] * 240) + '],"data_offsets":[0,8]}}'
    ),
    "a header that is too long": blob_of({"a": entry()})[8:].decode().rstrip() + " " * 70_000,
    "deep nesting within the length": '{"a":' + "[" * 60_000,
    "nested tables": '{"a":' * 10_000,
    "one number of many digits": "9" * 60_000,
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_oversize_header_is_refused_unparsed(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    monkeypatch.setattr("espalier.messages.tensor_blobs.json.loads", parsed.append)
    with pytest.raises(EspalierError):
        tensor_specs(blob_of(header, bytes(8)))
    assert parsed == []


@pytest.mark.parametrize(
    "entries",
    [
        {f"{number}": entry("U8", (0,), (0, 0)) for number in range(1025)},
        {"a": entry("U8", (1,) * 9, (0, 1))},
        {"n" * 257: entry("U8", (1,), (0, 1))},
    ],
    ids=["tensors", "dimensions", "name"],
)
def test_more_than_any_message_needs_is_refused(
    entries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its limits, the module accepts each of these blobs."""
    blob = blob_of(entries, bytes(1 if len(entries) == 1 else 0))
    with pytest.raises(EspalierError):
        tensor_specs(blob)
    for limit in ("MAX_HEADER_BYTES", "MAX_TENSORS", "MAX_DIMENSIONS", "MAX_NAME"):
        monkeypatch.setattr(f"espalier.messages.tensor_blobs.{limit}", 10**6)
    assert len(tensor_specs(blob)) == len(entries)


def test_a_size_of_eighteen_digits_is_read() -> None:
    assert tensor_specs(blob_of({"a": entry("U8", (0, 10**18 - 1), (0, 0))}))["a"].shape == (
        0,
        10**18 - 1,
    )


SMUGGLED = {
    "a field beside dtype and shape": blob_of({"a": entry() | {"note": SECRET}}, bytes(8)),
    "a name said twice": blob_of(
        '{"a": ' + json.dumps(SECRET) + ', "a": ' + json.dumps(entry()) + "}", bytes(8)
    ),
    "a third offset": blob_of({"a": entry(offsets=(0, 8, 4711))}, bytes(8)),
    "bits in blank space": blob_of({"a": entry()}, bytes(8), pad="\t \t\t \t  \n\r"),
    "a shape of fractions": blob_of({"a": entry(shape=[1.0])}, bytes(8)),
    "a negative shape": blob_of({"a": entry(shape=[-1, -1])}, bytes(8)),
}


@pytest.mark.parametrize("blob", SMUGGLED.values(), ids=SMUGGLED.keys())
def test_a_header_has_no_room_for_anything_else(blob: bytes) -> None:
    with pytest.raises(EspalierError):
        tensor_specs(blob)


def test_values_of_malformed_blob_are_refused() -> None:
    with pytest.raises(EspalierError, match="not a safetensors blob"):
        unpack_tensors(b"nonsense")


def test_value_errors_do_not_quote_header() -> None:
    with pytest.raises(EspalierError) as caught:
        unpack_tensors(SMUGGLED["a name said twice"])
    assert "Anna" not in str(caught.value)


# ----- Flower's records ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "key"), [(0, "block-0000"), (31, "block-0031"), (12345, "block-12345")]
)
def test_the_name_of_a_blocks_blob(index: int, key: str) -> None:
    assert block_key(index) == key


def test_flower_records_carry_blobs_unchanged() -> None:
    blobs = {"block-0000": b"\x00\xff", "block-0001": b""}
    record = to_record(blobs)
    assert {key: array.stype for key, array in record.items()} == dict.fromkeys(
        blobs, "safetensors"
    )
    assert from_record(record) == blobs


@pytest.mark.parametrize(
    "array",
    [
        Array(dtype="", shape=(), stype="numpy.ndarray", data=b"x"),
        Array(dtype="float32", shape=(), stype="safetensors", data=b"x"),
        Array(dtype="", shape=(5,), stype="safetensors", data=b"x"),
    ],
)
def test_other_serialisation_is_refused(array: Array) -> None:
    with pytest.raises(EspalierError, match="'block-0000': serialisation is not 'safetensors'"):
        from_record(ArrayRecord({"block-0000": array}))


@pytest.mark.parametrize(
    "keys", [[f"{number}" for number in range(4097)], ["k" * 65]], ids=["blobs", "key"]
)
def test_too_many_blobs_or_long_keys_are_refused(keys: list[str]) -> None:
    with pytest.raises(EspalierError) as caught:
        from_record(
            ArrayRecord(
                {key: Array(dtype="", shape=(), stype="safetensors", data=b"") for key in keys}
            )
        )
    assert len(str(caught.value)) < 100


def test_a_blobs_size_follows_from_its_specs() -> None:
    dtypes = ["?", "<u1", "<i1", "<f2", "<i2", "<u2", "<f4", "<i4", "<u4", "<f8", "<i8", "<u8"]
    generator = np.random.default_rng(0)
    for _ in range(200):
        names = {
            f"t{generator.integers(10 ** generator.integers(1, 5))}.x"
            for _ in range(generator.integers(0, 12))
        }
        arrays = {
            name: np.zeros(
                tuple(generator.integers(0, 40, generator.integers(0, 4))), generator.choice(dtypes)
            )
            for name in names
        }
        blob = pack_tensors(arrays)
        assert packed_bytes(tensor_specs(blob)) == len(blob)
