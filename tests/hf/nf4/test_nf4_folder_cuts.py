"""Smaller models and exports that are made from NF4 directories."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from espalier.errors import EspalierError
from espalier.hf.export.model import check_export, export_edited
from espalier.hf.files.checkpoint import Checkpoint
from espalier.hf.machine.computing import Computing
from espalier.hf.nf4.folder import write_quantised
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import export_structured
from espalier.hf.whole.model import load_whole
from espalier.models.structure import Structure
from tests.hf.nf4.nf4_folders import (
    CONFIGS,
    CPU,
    MATRIX,
    handed_out,
    linears_of,
    plainly_loaded,
    quantised_anew,
    same,
    written,
)
from tests.hf.tiny_encoders import save_encoder
from tests.hf.tiny_models import llama_config, random_model, save_model, token_sequences

# ----- smaller models -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "opt"])
@torch.no_grad()
def test_model_without_some_blocks_stays_plain(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    base = OpenedModel(saved(name))
    small = OpenedModel(base.directory, Structure.whole(base.plan).with_blocks([0, 2]))
    write_quantised(small, tmp_path / "nf4", True)
    theirs = plainly_loaded(tmp_path / "nf4")
    model = OpenedModel(tmp_path / "nf4")
    assert len(model.plan.blocks) == theirs.config.num_hidden_layers == 2
    assert type(theirs) is type(random_model(CONFIGS[name]))
    assert model.structure is None
    numbers = {
        name: name.replace("layers.2.", "layers.1.")
        for name in linears_of(base)
        if "layers.1." not in name
    }
    whole = quantised_anew(base, True)
    assert same(handed_out(model), {new: whole[old] for old, new in numbers.items()})
    samples = token_sequences(2, 9).to(theirs.device)
    ours = load_whole(model, Computing(theirs.device, torch.float32, 1), "nf4")
    assert torch.equal(theirs(input_ids=samples).logits, ours(input_ids=samples).logits)
    near = load_whole(small, Computing(theirs.device, torch.float32, 1), "nf4")
    torch.testing.assert_close(
        near(input_ids=samples).logits, theirs(input_ids=samples).logits, rtol=1e-4, atol=1e-4
    )


def test_without_no_block_it_is_the_whole_model(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    base = OpenedModel(saved("qwen2"))
    write_quantised(
        OpenedModel(base.directory, Structure.whole(base.plan)), tmp_path / "kept", True
    )
    expected = written(base.directory, tmp_path / "whole", True)
    assert (tmp_path / "kept" / "model.safetensors").read_bytes() == (
        expected / "model.safetensors"
    ).read_bytes()
    assert same(handed_out(OpenedModel(tmp_path / "kept")), quantised_anew(base, True))


def test_dropped_blocks_leave_other_codes_alone(folder: Path, tmp_path: Path) -> None:
    whole = OpenedModel(folder)
    small = OpenedModel(folder, Structure.whole(whole.plan).with_blocks([1, 2]))
    expected = {
        name.replace("layers.1", "layers.0").replace("layers.2", "layers.1"): tensors
        for name, tensors in handed_out(whole).items()
        if "layers.0." not in name
    }
    assert same(handed_out(small), expected)
    write_quantised(small, tmp_path / "small", True)
    assert same(handed_out(OpenedModel(tmp_path / "small")), expected)
    assert len({small.sha256, whole.sha256, OpenedModel(tmp_path / "small").sha256}) == 3


def test_units_are_cut_from_nf4_as_from_float32(folder: Path) -> None:
    whole = OpenedModel(folder)
    small = OpenedModel(
        folder, Structure.whole(whole.plan).keeping({0: {"channels": list(range(0, 128, 2))}})
    )
    assert torch.equal(small.checkpoint.read(MATRIX), whole.checkpoint.read(MATRIX)[:, ::2])
    up = MATRIX.replace("down", "up")
    assert torch.equal(small.checkpoint.read(up), whole.checkpoint.read(up)[::2])
    assert handed_out(small)[MATRIX]["packed"].shape == (64 * 64 // 2, 1)


def test_unsupported_structures_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    base = OpenedModel(saved("llama"))
    uneven = OpenedModel(
        base.directory, Structure.whole(base.plan).keeping({0: {"channels": list(range(64))}})
    )
    with pytest.raises(
        EspalierError,
        match=r"llama: the smaller model cannot be written in NF4, .*; drop only whole blocks",
    ):
        write_quantised(uneven, tmp_path / "nf4", True)
    encoder = save_encoder(tmp_path / "encoder", "bert", hidden_size=64, intermediate_size=64)
    with pytest.raises(EspalierError, match=r"an encoder"):
        write_quantised(OpenedModel(encoder), tmp_path / "nf4", True)
    narrow = save_model(tmp_path / "narrow", llama_config(hidden_size=64, intermediate_size=96))
    with pytest.raises(EspalierError, match=r"mlp.down_proj.weight has 96 input features"):
        write_quantised(OpenedModel(narrow), tmp_path / "nf4", True)
    assert not (tmp_path / "nf4").exists()


# ----- models made from an NF4 base ---------------------------------------------------------------


def test_an_export_is_in_float32_and_says_so(
    saved: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    """Covers sharded bases, whose index names other tensors than the export."""
    way = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = AutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=way)
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / file, tmp_path / "sharded" / file)
    for source in (folder, tmp_path / "sharded"):
        stream = BlockStream(OpenedModel(source), Computing(CPU, torch.float32, 1))
        export_edited(stream.model, dense, tmp_path / "model")
        assert "quantization_config" not in json.loads(
            (tmp_path / "model" / "config.json").read_text()
        )
        check_export(stream, dense, tmp_path / "model", token_sequences(2, 7))
        assert type(OpenedModel(tmp_path / "model").checkpoint) is Checkpoint


def test_smaller_export_is_in_float32(folder: Path, tmp_path: Path) -> None:
    small = OpenedModel(folder, Structure.whole(OpenedModel(folder).plan).with_blocks([0, 2]))
    export_structured(small, dense, tmp_path / "model", "plain")
    found = OpenedModel(tmp_path / "model")
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    assert torch.equal(found.checkpoint.read(MATRIX), small.checkpoint.read(MATRIX))
