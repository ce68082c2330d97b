"""Pieces of a tensor add up to the tensor, and each has at most the permitted size."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from espalier.hf.files import checkpoint as checkpoint_module
from espalier.hf.files.checkpoint import Checkpoint
from espalier.hf.files.tensor_pieces import converted, pieces

CPU = torch.device("cpu")


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(10, 33, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def stored(weight: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Checkpoint that is read 512 bytes at a time."""
    monkeypatch.setattr(checkpoint_module, "CHUNK", 512)
    tensors = {
        "f32": weight,
        "bf16": weight.to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


def test_pieces_follow_in_row_major_order(stored: Checkpoint, weight: torch.Tensor) -> None:
    found = list(pieces(stored, "f32"))
    assert [len(piece) for piece in found] == [128, 128, 74]
    assert torch.equal(torch.cat(found), weight.flatten())
    assert [len(piece) for piece in pieces(stored, "bf16")] == [256, 74]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_converted_is_rounded_once(
    stored: Checkpoint, weight: torch.Tensor, name: str, dtype: torch.dtype
) -> None:
    expected = (weight if name == "f32" else weight.to(torch.bfloat16)).to(dtype)
    found = converted(stored, name, dtype, CPU)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_tensors_without_rows_or_elements(stored: Checkpoint) -> None:
    assert converted(stored, "scalar", torch.float32, CPU).item() == 2.5
    assert converted(stored, "empty", torch.float32, CPU).shape == (0, 4)
