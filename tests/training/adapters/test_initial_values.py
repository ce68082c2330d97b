"""Initial adapters: equal for all clients, bounded, and without effect on the output."""

import torch

from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.tables.lora import LoraSettings
from espalier.training.initial_values import initial_adapters

LINEARS = (LinearPlan("attn.q", "q", (24, 16)), LinearPlan("mlp.down", "down", (16, 64)))
PLAN = ModelPlan(tuple(BlockPlan(index, LINEARS) for index in range(3)), 10_000)


def plan(rank: int = 8) -> AdapterPlan:
    return adapter_plan(PLAN, LoraSettings(rank=rank, targets="all", layers="0,2"))


def test_names_shapes_and_dtypes() -> None:
    found = initial_adapters(plan(), 3)
    assert {
        key: {name: tuple(value.shape) for name, value in block.items()}
        for key, block in found.items()
    } == {
        key: {
            "attn.q.lora_a": (8, 16),
            "attn.q.lora_b": (24, 8),
            "mlp.down.lora_a": (8, 64),
            "mlp.down.lora_b": (16, 8),
        }
        for key in ("block-0000", "block-0002")
    }
    assert {value.dtype for block in found.values() for value in block.values()} == {torch.float32}


def test_b_is_zero_and_a_fills_its_bounds() -> None:
    """The bound is 1 / sqrt(in): 1/4 for 16 inputs and 1/8 for 64."""
    for block in initial_adapters(plan(16), 3).values():
        assert not block["attn.q.lora_b"].any()
        assert not block["mlp.down.lora_b"].any()
        for name, bound in (("attn.q.lora_a", 1 / 4), ("mlp.down.lora_a", 1 / 8)):
            assert 0.9 * bound < block[name].abs().max().item() <= bound
            assert block[name].mean().abs().item() < 0.2 * bound
            assert abs(block[name].std().item() / bound - 3**-0.5) < 0.06


def test_smaller_rank_starts_with_first_rows() -> None:
    large = initial_adapters(plan(8), 3)
    small = initial_adapters(plan(8).limited(3), 3)
    for key, block in small.items():
        for name in ("attn.q.lora_a", "mlp.down.lora_a"):
            assert torch.equal(block[name], large[key][name][:3])


def test_every_matrix_block_and_seed_differs() -> None:
    firsts = [
        block[name].flatten()[:5].mul(scale).tolist()
        for seed in (3, 4)
        for block in initial_adapters(plan(), seed).values()
        for name, scale in (("attn.q.lora_a", 4), ("mlp.down.lora_a", 8))
    ]
    assert len({tuple(values) for values in firsts}) == 8


def test_what_else_is_adapted_changes_nothing() -> None:
    alone = initial_adapters(adapter_plan(PLAN, LoraSettings(targets="mlp.down", layers="2")), 3)[
        "block-0002"
    ]
    together = initial_adapters(plan(), 3)["block-0002"]
    assert torch.equal(alone["mlp.down.lora_a"], together["mlp.down.lora_a"])
