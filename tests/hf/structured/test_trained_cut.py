"""Trained values follow a cut: the smaller adapter's update is a slice of the larger one's."""

from pathlib import Path

import pytest
import torch

from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.selection import cut_adapter_plan, cut_trained
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.plan import ModelPlan
from espalier.models.structure import Structure, structured_plan
from espalier.settings.tables.lora import LoraSettings
from tests.hf.structured.structured_models import save, uneven

WHOLE = {
    "block-0002": {"norm.mlp.weight": (32,), "attn.q.weight": (64, 32)},
    "block-0001": {"norm.mlp.weight": (32,)},
    "final": {"norm.final.weight": (32,)},
}


def made(folder: Path) -> tuple[ModelPlan, Structure, AdapterPlan]:
    model = OpenedModel(save(folder, "llama"))
    adapters = adapter_plan(model.plan, LoraSettings(rank=3, targets="all", alpha=6.0))
    return model.plan, uneven(model), AdapterPlan(adapters.blocks, WHOLE)


def drawn(adapters: AdapterPlan) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: {name: torch.randn(shape, generator=generator) for name, shape in own.items()}
        for key, own in adapters.shapes().items()
    }


def test_the_plan_is_that_of_the_smaller_model(tmp_path: Path) -> None:
    plan, structure, adapters = made(tmp_path)
    found = cut_adapter_plan(adapters, plan, structure)
    expected = adapter_plan(
        structured_plan(plan, structure), LoraSettings(rank=3, targets="all", alpha=6.0)
    )
    assert found.blocks == expected.blocks
    # Block 2 keeps one of 4 groups, each with two query heads of width 8.
    assert found.whole == {
        "block-0001": {"norm.mlp.weight": (32,), "attn.q.weight": (16, 32)},
        "final": {"norm.final.weight": (32,)},
    }


@pytest.mark.parametrize("residual", [False, True])
def test_smaller_update_is_a_slice_of_the_larger(tmp_path: Path, residual: bool) -> None:
    model = OpenedModel(save(tmp_path, "llama"))
    structure = uneven(model, residual=residual)
    adapters = adapter_plan(model.plan, LoraSettings(rank=3, targets="all", alpha=6.0))
    tensors = drawn(adapters)
    cut = cut_trained(tensors, model.plan, structure)
    assert {
        key: {name: tuple(value.shape) for name, value in own.items()} for key, own in cut.items()
    } == cut_adapter_plan(adapters, model.plan, structure).shapes()
    for index, block in enumerate(structure.blocks):
        for linear in model.plan.blocks[block.source].linears:
            before = tensors[f"block-{block.source:04d}"]
            after = cut[f"block-{index:04d}"]
            whole, small = (
                own[f"{linear.name}.lora_b"] @ own[f"{linear.name}.lora_a"]
                for own in (before, after)
            )
            assert (
                small.shape
                == structured_plan(model.plan, structure).blocks[index].linear(linear.name).shape
            )
            rows, columns = kept_by_hand(block, linear.name, whole.shape)
            torch.testing.assert_close(small, whole[rows][:, columns])


def kept_by_hand(block: object, name: str, shape: torch.Size) -> tuple[list[int], list[int]]:
    """Return the kept rows and columns, number by number; two query heads of width 8 per group."""
    kinds = {
        "attn.q": ("q", "attn_reads"), "attn.k": ("k", "attn_reads"), "attn.v": ("k", "attn_reads"),
        "attn.o": ("attn_writes", "q"),
        "mlp.gate": ("channels", "mlp_reads"), "mlp.up": ("channels", "mlp_reads"),
        "mlp.down": ("mlp_writes", "channels"),
    }  # fmt: skip
    found = []
    for side, kind in enumerate(kinds[name]):
        if kind in ("q", "k"):
            size = 16 if kind == "q" else 8
            found.append([at for at in range(shape[side]) if at // size in block.groups])  # type: ignore[attr-defined]
        else:
            found.append([at for at in range(shape[side]) if at in getattr(block, kind)])
    return found[0], found[1]


def test_complete_structure_changes_nothing(tmp_path: Path) -> None:
    plan, _, adapters = made(tmp_path)
    whole = Structure.whole(plan)
    tensors = drawn(adapters)
    assert cut_adapter_plan(adapters, plan, whole) == adapters
    same = cut_trained(tensors, plan, whole)
    assert all(
        torch.equal(same[key][name], value)
        for key, own in tensors.items()
        for name, value in own.items()
    )
