"""An exported model is a plain Hugging Face model, and the check finds a wrong one."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.errors import EspalierError
from espalier.hf.export.model import ExportError, check_export, export_edited, require_close
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream import edits
from espalier.hf.stream.block_stream import BlockStream
from tests.hf.tiny_models import llama_config, random_masks, save_model, token_sequences

SAMPLES = token_sequences(2, 8)


def masks_of(model: OpenedModel, index: int) -> dict[str, Tensor]:
    return random_masks(
        {linear.name: linear.shape for linear in model.plan.blocks[index].linears}, index
    )


def exported(directory: Path, target: Path) -> Path:
    model = OpenedModel(directory)
    export_edited(model, edits.masked(lambda index: masks_of(model, index)), target)
    return target


def all_tensors(directory: Path) -> dict[str, Tensor]:
    return {
        name: value
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ----- the written files --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["untied", "sharded", "tied"])
def test_export_changes_only_masked_weights(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory: Path = request.getfixturevalue(kind)
    found = all_tensors(exported(directory, tmp_path / "model"))
    stored = all_tensors(directory)
    assert set(found) == set(stored)
    model = OpenedModel(directory)
    masked = {
        linear.parameter: masks_of(model, block.index)[linear.name]
        for block in model.plan.blocks
        for linear in block.linears
    }
    for name, value in stored.items():
        expected = value.clone()
        if name in masked:
            expected[masked[name]] = 0
            assert (found[name] == 0).sum() == masked[name].sum()
        assert found[name].dtype == value.dtype
        assert bits(found[name]) == bits(expected), name


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "dense", llama_config(), dtype=torch.bfloat16)
    target = exported(directory, tmp_path / "model")
    assert {value.dtype for value in all_tensors(target).values()} == {torch.bfloat16}
    assert (
        AutoModelForCausalLM.from_pretrained(target, local_files_only=True).dtype == torch.bfloat16
    )
    stored = all_tensors(directory)
    for name, value in all_tensors(target).items():
        kept = value != 0
        assert torch.equal(value[kept], stored[name][kept])


def test_config_tokenizer_and_index_are_copied(sharded: Path, tmp_path: Path) -> None:
    target = exported(sharded, tmp_path / "model")
    assert sorted(file.name for file in target.iterdir()) == sorted(
        file.name for file in sharded.iterdir()
    )
    for file in sharded.iterdir():
        if file.suffix != ".safetensors":
            assert (target / file.name).read_bytes() == file.read_bytes()
    assert "sparsity_config" not in json.loads((target / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(target, local_files_only=True)("w3 w4")["input_ids"] == [
        3,
        4,
    ]


def test_safetensors_metadata_names_the_format(untied: Path, tmp_path: Path) -> None:
    target = exported(untied, tmp_path / "model")
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_other_weights_and_card_are_not_copied(copied: Path, tmp_path: Path) -> None:
    for name in (
        "pytorch_model.bin",
        "README.md",
        "model.gguf",
        ".hidden",
        "wiki_heldout.txt",
        "train.json",
    ):
        (copied / name).write_text("of the dense model")
    (copied / "LICENSE").write_text("keep me")
    names = {file.name for file in exported(copied, tmp_path / "model").iterdir()}
    assert (
        names
        & {
            "pytorch_model.bin",
            "README.md",
            "model.gguf",
            ".hidden",
            "wiki_heldout.txt",
            "train.json",
        }
        == set()
    )
    assert "LICENSE" in names


def test_a_card_is_written_beside_it(untied: Path, tmp_path: Path) -> None:
    export_edited(OpenedModel(untied), edits.dense, tmp_path / "model", "# a card\n")
    assert (tmp_path / "model" / "README.md").read_text() == "# a card\n"


def test_an_earlier_export_is_replaced_whole(untied: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    target = exported(untied, tmp_path / "model")
    assert not (target / "model-00001-of-00002.safetensors").exists()
    assert os.listdir(tmp_path) == ["model"]


def test_the_same_masks_give_the_same_bytes(untied: Path, tmp_path: Path) -> None:
    files = [exported(untied, tmp_path / name) / "model.safetensors" for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_dense_model_is_not_touched(copied: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    exported(copied, tmp_path / "model")
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == before


def test_full_disk_leaves_no_model(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(EspalierError, match="No space left"):
        exported(untied, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_disk_full_while_copying_is_an_error(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfile", no_space)
    with pytest.raises(EspalierError):
        exported(untied, tmp_path / "model")


def test_no_masks_export_the_dense_model(untied: Path, tmp_path: Path) -> None:
    export_edited(OpenedModel(untied), edits.dense, tmp_path / "model")
    found = all_tensors(tmp_path / "model")
    stored = all_tensors(untied)
    assert all(bits(found[name]) == bits(stored[name]) for name in stored)


# ----- the check of the written files -------------------------------------------------------------


@pytest.fixture
def model(untied: Path) -> OpenedModel:
    return OpenedModel(untied)


@pytest.fixture
def stream(model: OpenedModel, computing: Computing) -> BlockStream:
    return BlockStream(model, computing)


@pytest.fixture
def target(model: OpenedModel, tmp_path: Path) -> Path:
    return exported(model.directory, tmp_path / "model")


def check(stream: BlockStream, target: Path) -> None:
    check_export(
        stream,
        edits.masked(lambda index: masks_of(stream.model, index)),
        target,
        SAMPLES,
    )


def change(target: Path, name: str, where: Any, value: float) -> None:
    """Change weights of an exported file."""
    tensors = load_file(target / "model.safetensors")
    tensors[name][where] = value
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def test_a_good_export_passes(stream: BlockStream, target: Path) -> None:
    check(stream, target)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"]
)
def test_a_changed_weight_is_noticed(stream: BlockStream, target: Path, name: str) -> None:
    change(target, name, 3, 5.0)
    with pytest.raises(ExportError, match="not usable"):
        check(stream, target)


def test_tiny_weight_change_is_noticed_by_name(stream: BlockStream, target: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    row, column = masks_of(stream.model, 0)["attn.q"].nonzero()[0].tolist()
    change(target, name, (row, column), 1e-9)
    with pytest.raises(ExportError, match=name):
        check(stream, target)


def test_nan_weights_are_noticed(stream: BlockStream, target: Path) -> None:
    change(target, "model.norm.weight", 0, float("nan"))
    with pytest.raises(ExportError, match="differ by nan"):
        check(stream, target)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_non_finite_logits_are_told_as_such(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    """Whatever the reloaded model gives: it is not the export that is wrong."""
    meant = torch.tensor([[1.0, value]])
    half = (
        r"float16 overflows beyond 65504: set dtype to 'bfloat16' or 'float32'; "
        if dtype == torch.float16
        else ""
    )
    told = (
        rf"model: the result gives logits that are NaN or infinite, .*; {half}if it was trained, "
    )
    for found in (meant, torch.ones(1, 2)):
        with pytest.raises(ExportError, match=told):
            require_close(
                [torch.ones(1, 2), found], [torch.ones(1, 2), meant], dtype, tmp_path / "model"
            )


def test_masks_of_another_run_are_noticed(stream: BlockStream, target: Path) -> None:
    others = edits.masked(lambda index: masks_of(stream.model, 2 - index))
    with pytest.raises(ExportError):
        check_export(stream, others, target, SAMPLES)


def test_changed_unused_embedding_is_noticed(stream: BlockStream, target: Path) -> None:
    absent = min(set(range(96)) - set(SAMPLES.flatten().tolist()))
    change(target, "model.embed_tokens.weight", absent, 5.0)
    with pytest.raises(ExportError):
        check(stream, target)
