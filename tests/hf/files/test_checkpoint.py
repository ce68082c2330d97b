"""Safetensors shards: read tensor by tensor; damaged files are named in the error."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from espalier.errors import EspalierError
from espalier.hf.files import checkpoint
from espalier.hf.files.checkpoint import Checkpoint, shard_header, write_shard
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.tensor_blobs import TensorSpec

TENSORS = {
    "f32": torch.tensor([[1.5, -2.0], [0.25, 3.0]]),
    "bf16": torch.tensor([1.0, 0.3333, -7e30], dtype=torch.bfloat16),
    "f16": torch.tensor([[[1.0]], [[65504.0]]], dtype=torch.float16),
    "i64": torch.tensor([-1, 2**62]),
    "bool": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def rewrite_header(path: Path, change: Any) -> None:
    """Change the header of a safetensors file and leave its data as they are."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(change(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


# ----- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_bit_by_bit(folder: Path, name: str) -> None:
    found = Checkpoint(folder).read(name)
    assert (found.dtype, found.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
    assert torch.equal(found, TENSORS[name])


def test_a_read_tensor_is_the_callers_own(folder: Path) -> None:
    reader = Checkpoint(folder)
    reader.read("f32").zero_()
    assert torch.equal(reader.read("f32"), TENSORS["f32"])
    assert torch.equal(load_file(folder / "model.safetensors")["f32"], TENSORS["f32"])


def test_names_dtypes_and_shapes(folder: Path) -> None:
    found = Checkpoint(folder).tensors
    assert {name: tuple(tensor.shape) for name, tensor in TENSORS.items()} == {
        n: stored.shape for n, stored in found.items()
    }
    assert {name: stored.dtype for name, stored in found.items()}["bf16"] == "BF16"


def test_a_large_tensor_is_read_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK", 5)
    reader = Checkpoint(folder)
    assert [len(chunk) for chunk in reader.chunks("f32")] == [5, 5, 5, 1]
    assert torch.equal(reader.read("f32"), TENSORS["f32"])


def test_shards_are_found_by_the_index(untied: Path, sharded: Path) -> None:
    one = Checkpoint(untied)
    many = Checkpoint(sharded)
    assert len(one.shards) == 1 < len(many.shards)
    assert set(one.tensors) == set(many.tensors)
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.tensors)


# ----- damage -------------------------------------------------------------------------------------


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        EspalierError,
        match=(
            r"contains neither model.safetensors nor model.safetensors.index.json, but"
            r" pytorch_model.bin; write the model again with save_pretrained"
        ),
    ):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    index = (sharded / "model.safetensors.index.json").read_text()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        EspalierError, match=r"index.json: names 'model-00001-of-\d+.safetensors', .*do not exist"
    ):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": "../b.safetensors"}}',
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        EspalierError, match=r"model.safetensors.index.json: (is no|has no|contains a|names)"
    ):
        Checkpoint(tmp_path)


def test_an_index_with_numbers_for_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"a": 3}}'
    )
    with pytest.raises(EspalierError, match=r"model.safetensors.index.json: names '3'"):
        Checkpoint(tmp_path)


def test_index_without_metadata_is_refused(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path / "copied")
    index = tmp_path / "copied" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with pytest.raises(KeyError, match="metadata"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "copied")
    with pytest.raises(EspalierError, match=r"index.json: has no .*'metadata'; write"):
        Checkpoint(tmp_path / "copied")


def test_single_file_precedes_an_index(sharded: Path, untied: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path / "copied")
    changed = {name: value + 1 for name, value in load_file(untied / "model.safetensors").items()}
    save_file(changed, tmp_path / "copied" / "model.safetensors", {"format": "pt"})
    found = Checkpoint(tmp_path / "copied")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "copied").state_dict()
    assert not found.is_sharded
    assert all(torch.equal(found.read(name), plain[name]) for name in changed)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("adapter_config.json", "{}", "adapter_config.json is in the directory of the model"),
        ("shard-00000-model-00001-of-00002.safetensors", "", "shard of distributed training"),
    ],
)
def test_ambiguous_weights_are_refused(folder: Path, name: str, text: str, told: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(EspalierError, match=told):
        Checkpoint(folder)


def test_other_weight_file_in_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    with pytest.raises(EspalierError, match=r"transformers_weights = 'other.safetensors'"):
        OpenedModel(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 1) + b"{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 8) + b'{"a":{}}',
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n",
    ],
)
def test_a_file_that_is_no_safetensors_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(
        EspalierError,
        match=r"model.safetensors: is not a whole safetensors file: .*; (copy|.*git lfs pull)",
    ):
        Checkpoint(folder)


def test_a_truncated_shard_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EspalierError, match=r"model.safetensors: .*copy the"):
        Checkpoint(folder)


def test_a_dtype_that_cannot_be_pruned_is_named(folder: Path) -> None:
    def eight_bits(header: dict[str, Any]) -> dict[str, Any]:
        header["f32"] |= {"dtype": "F8_E4M3", "shape": [16]}
        return header

    rewrite_header(folder / "model.safetensors", eight_bits)
    with pytest.raises(EspalierError, match=r"tensor f32 has the unsupported dtype F8_E4M3"):
        Checkpoint(folder)


def test_shard_truncated_after_opening_is_named(folder: Path) -> None:
    reader = Checkpoint(folder)
    last = max((name for name in TENSORS if name != "empty"), key=lambda n: reader.tensors[n].start)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EspalierError, match=rf"model.safetensors: ends before tensor {last}"):
        reader.read(last)


TAMPERED = {
    "a larger shape": lambda entry: entry | {"shape": [3, 2]},
    "a smaller shape": lambda entry: entry | {"shape": [2, 1]},
    "a negative shape": lambda entry: entry | {"shape": [-2, -2]},
    "a wider dtype": lambda entry: entry | {"dtype": "F64"},
    "a negative offset": lambda entry: entry | {"data_offsets": [-16, 0]},
    "offsets the wrong way round": (
        lambda entry: entry | {"data_offsets": entry["data_offsets"][::-1]}
    ),
    "a byte too few": (
        lambda entry: (
            entry | {"data_offsets": [entry["data_offsets"][0], entry["data_offsets"][1] - 1]}
        )
    ),
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(change, id=name) for name, change in TAMPERED.items()],
)
def test_tampered_header_names_the_file(folder: Path, change: Any) -> None:
    rewrite_header(
        folder / "model.safetensors", lambda header: header | {"f32": change(header["f32"])}
    )
    with pytest.raises(EspalierError, match=r"model.safetensors"):
        Checkpoint(folder).read("f32")


# ----- writing ------------------------------------------------------------------------------------


SPECS = {"bf16": TensorSpec("BF16", (3,)), "f32": TensorSpec("F32", (2, 2))}


def test_what_is_written_is_read_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    write_shard(path, SPECS, ((name, TENSORS[name]) for name in SPECS))
    found = load_file(path)
    assert set(found) == {"bf16", "f32"}
    assert all(torch.equal(found[name], TENSORS[name]) for name in found)


def test_the_data_begin_at_a_multiple_of_eight() -> None:
    for metadata in ({}, {"a": "b"}, {"a": "bc"}):
        assert len(shard_header(SPECS, metadata)) % 8 == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("f32", TENSORS["f32"], "expected 6 bytes of bf16, but got 16 of f32"),
        ("bf16", TENSORS["bf16"][:2], "expected 6 bytes of bf16, but got 4 of bf16"),
    ],
)
def test_tensors_must_come_as_announced(
    tmp_path: Path, name: str, value: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path / "out.safetensors", SPECS, iter([(name, value)]))
    assert not list(tmp_path.iterdir())
