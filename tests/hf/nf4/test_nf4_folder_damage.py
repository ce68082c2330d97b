"""Damaged NF4 directories: the error names what is wrong."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.errors import EspalierError
from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.opening.opened_model import OpenedModel
from tests.hf.nf4.nf4_folders import MATRIX, Change, handed_out, other


def state(**changes: object) -> Change:
    """Return a change of the quantisation state of a matrix."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{MATRIX}.quant_state.bitsandbytes__nf4"
        said = json.loads(bytes(tensors[name].tolist())) | changes
        tensors[name] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return change


def without(part: str) -> Change:
    return lambda tensors: tensors.__delitem__(f"{MATRIX}.{part}")


def as_fp4(tensors: dict[str, Tensor]) -> None:
    tensors[f"{MATRIX}.quant_state.bitsandbytes__fp4"] = tensors.pop(
        f"{MATRIX}.quant_state.bitsandbytes__nf4"
    )


DAMAGE: dict[str, tuple[Change, str]] = {
    "no scales": (without("absmax"), "absmax of a matrix in NF4 is missing"),
    "no table": (without("quant_map"), "quant_map of a matrix in NF4 is missing"),
    "no scales of scales": (
        without("nested_absmax"),
        "nested_absmax of a matrix in NF4 is missing",
    ),
    "no state": (
        without("quant_state.bitsandbytes__nf4"),
        "bitsandbytes__nf4 of a matrix in NF4 is missing",
    ),
    "no codes": (
        lambda tensors: tensors.__delitem__(MATRIX),
        "down_proj.weight of a matrix in NF4 is missing",
    ),
    "codes in float": (
        other("", lambda codes: codes.float()),
        r"is F32 \[4096, 1\], not U8 \[4096, 1\]",
    ),
    "codes too short": (
        other("", lambda codes: codes[:-1]),
        r"is U8 \[4095, 1\], not U8 \[4096, 1\]",
    ),
    "scales too short": (
        other("absmax", lambda scales: scales[1:]),
        r"absmax of a matrix in NF4 is U8 \[127\], not U8 \[128\]",
    ),
    "scales in float": (
        other("absmax", lambda scales: scales.float()),
        r"absmax of a matrix in NF4 is F32 \[128\], not U8 \[128\]",
    ),
    "another shape": (state(shape=[128, 128]), r"is U8 \[4096, 1\], not U8 \[8192, 1\]"),
    "rows that share blocks": (state(shape=[256, 32]), "rows are not a multiple of the block size"),
    "no shape": (state(shape=[8192]), "has no shape"),
    "a shape of words": (state(shape=["a", "b"]), "has no shape"),
    "shape null": (state(shape=None), "was not written by bitsandbytes"),
    "blocks of another length": (state(blocksize=128), "not NF4 in blocks of 64"),
    "another type": (state(quant_type="fp4"), "not NF4 in blocks of 64"),
    "another nested length": (state(nested_blocksize=64), "scales are quantised in an unknown way"),
    "offset no number": (
        state(nested_offset=float("nan")),
        "scales are quantised in an unknown way",
    ),
    "state no text": (
        other("quant_state.bitsandbytes__nf4", lambda text: text[:20]),
        "copy the model again",
    ),
    "state too long": (
        other("quant_state.bitsandbytes__nf4", lambda text: text.repeat(17)),
        "no text of at most 4096 bytes",
    ),
    "fp4": (as_fp4, "nf4 of a matrix in NF4 is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder_is_refused_on_opening(damage: str, folder: Path) -> None:
    change, message = DAMAGE[damage]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EspalierError, match=rf"nf4.*: tensor .*{message}.*"):
        OpenedModel(folder)


@pytest.mark.parametrize("part", ["quant_map", "nested_quant_map"])
def test_other_tables_are_refused_on_reading(part: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{MATRIX}.{part}"] += 0.01
    save_file(tensors, folder / "model.safetensors")
    model = OpenedModel(folder)
    for read in (lambda: model.checkpoint.read(MATRIX), lambda: handed_out(model)):
        with pytest.raises(
            EspalierError,
            match=rf"model.safetensors: tensor {MATRIX}.{part} of a matrix in NF4 is not the table",
        ):
            read()


def test_a_file_that_was_cut_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    model = OpenedModel(folder)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(EspalierError, match=r"model.safetensors: is not a whole"):
        OpenedModel(folder)
    with pytest.raises(
        EspalierError, match=r"model.safetensors: ends before tensor model.layers.2"
    ):
        model.checkpoint.read("model.layers.2.self_attn.v_proj.weight")
    with pytest.raises(EspalierError, match=r"model.safetensors: ends before tensor"):
        handed_out(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_8bit": True, "load_in_4bit": False}, "load_in_8bit = True"),
        ({"load_in_4bit": False}, "load_in_4bit = False"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4'"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage = 'bfloat16'"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
        ({"quant_method": ["bitsandbytes"]}, "quant_method"),
        ({"bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant = 'yes'"),
    ],
)
def test_another_quantisation_is_named(
    changes: dict[str, object], message: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        EspalierError,
        match=(
            f"config.json: quantization_config is set, with {message}.*;"
            " name the model before quantisation"
        ),
    ):
        OpenedModel(folder)


def test_contradiction_on_scales_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_use_double_quant"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        EspalierError, match=r"model.safetensors: .*disagrees on whether its scales are quantised"
    ):
        OpenedModel(folder)


def test_configuration_alone_makes_no_nf4_model(
    saved: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(saved("llama"), tmp_path / "saved")
    shutil.copyfile(folder / "config.json", directory / "config.json")
    with pytest.raises(
        EspalierError, match=r"quantization_config in config.json is set, but no matrix is in NF4"
    ):
        OpenedModel(directory)
    assert isinstance(OpenedModel(folder).checkpoint, QuantisedCheckpoint)
