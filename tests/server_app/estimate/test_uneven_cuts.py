"""Bounds of adapter sizes when groups compete: no possible cut has smaller or larger adapters."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from espalier.hf.opening.config_only_model import described
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.selection import lowest
from espalier.messages.blobs.cut_bits import pack_bits
from espalier.messages.tensor_blobs import packed_bytes, wire_specs
from espalier.methods.tuning.fedspine import FedSpineSettings, trained
from espalier.models.groups import Cut, Groups
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import RunSettings, parse
from espalier.settings.tables.federation import WireDtype
from server_app.estimate.messages.dry_run import Case
from server_app.estimate.messages.uneven_cuts import uneven_cut

SHAPES = {
    "attn.q": (16, 16), "attn.k": (8, 16), "attn.v": (8, 16), "attn.o": (16, 16),
    "mlp.gate": (120, 16), "mlp.up": (120, 16), "mlp.down": (16, 120),
}  # fmt: skip
"""Four groups with two query heads each, of width 2, and 120 channels.

The digits of the shapes therefore differ.
"""
BLOCKS = tuple(
    BlockPlan(index, tuple(LinearPlan(name, name, SHAPES[name]) for name in SHAPES))
    for index in range(3)
)
PLAN = ModelPlan(BLOCKS, 30_000, head_dim=2, heads_per_group=2)
GROUPS = Groups.of(PLAN)


def settings(**changes: Any) -> RunSettings:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return parse(
        {
            "method": "fedspine",
            "federation.rounds": 6,
            "lora.rank": 3,
            **given,
        }
    )


def cuts(run: RunSettings, share: float, plan: ModelPlan = PLAN, **changes: int) -> list[Cut]:
    """Return the cuts with the fewest and the most bytes."""
    given: dict[str, Any] = {"rank": run.lora.rank, **changes}
    groups = Groups.of(plan)
    return [
        uneven_cut(groups, run, trained(plan, run), share, case, **given) for case in get_args(Case)
    ]


def bytes_of(run: RunSettings, cut: Cut) -> int:
    """Return the bytes of the adapters' blobs in the shapes that a cut leaves."""
    shapes = trained(PLAN, run, None, pack_bits(cut)).shapes()
    return sum(packed_bytes(wire_specs(own, run.federation.wire_dtype)) for own in shapes.values())


def numbers_of(run: RunSettings, plan: ModelPlan, cut: Cut) -> int:
    return trained(plan, run, None, pack_bits(cut)).num_parameters


@pytest.mark.parametrize("wire_dtype", get_args(WireDtype))
@pytest.mark.parametrize("selection", ["global", "block"])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "targets", ["all", "attn.v,mlp.down", "attn.q,attn.k,attn.v,attn.o,mlp.up"]
)
def test_no_cut_of_a_device_is_beyond_the_bounds(
    wire_dtype: str, selection: str, multiple: int, targets: str
) -> None:
    """Scores may be arbitrary or favour whole kinds and blocks, in any number of steps."""
    run = settings(
        federation__wire_dtype=wire_dtype, pruning__selection=selection,
        pruning__channel_multiple=multiple, lora__targets=targets, pruning__ratio=0.6,
    )  # fmt: skip
    job = run.of(FedSpineSettings)
    generator = np.random.default_rng(multiple)
    limits = {share: [bytes_of(run, cut) for cut in cuts(run, share)] for share in (0.2, 0.6)}
    for _ in range(12):
        favoured = generator.permutation(len(GROUPS.counts))
        for values in (
            generator.random(len(GROUPS.costs)),
            favoured[GROUPS.pools] + generator.random(len(GROUPS.costs)),
        ):
            cut = GROUPS.none
            for share in (0.2, 0.6):
                cut = lowest(GROUPS, torch.from_numpy(values), job, share, cut)
                least, most = limits[share]
                assert least <= bytes_of(run, cut) <= most


def test_bounds_by_hand() -> None:
    """A group costs (4 + 2 + 2 + 4) x 16 = 192 parameters, a channel 48.

    With LoRA on attn.v and mlp.down, cutting a group removes 2 adapter parameters per rank and a
    channel 1, so channels remove more for the same cost. Three blocks cost 3 (4 x 192 + 120 x 48) =
    19584, of which 10% are 1959. The fewest adapter parameters go with all 9 groups that can be cut
    (1728 parameters, 18 of the adapters) and 231 / 48 channels (4). The most go with channels only,
    up to one group more: (1959 + 192) / 48, which is 45.
    """
    run = settings(lora__targets="attn.v,mlp.down", pruning__selection="global")
    whole = numbers_of(run, PLAN, GROUPS.none)
    # The adapters are so large that the bytes of their shapes do not count.
    found = cuts(run, 0.1, rank=10**9)
    assert [(whole - numbers_of(run, PLAN, cut)) // 3 for cut in found] == [45, 18 + 4]


@pytest.mark.parametrize("selection", ["global", "block"])
def test_bounds_of_a_7b_model_are_near_each_other(tmp_path: Path, selection: str) -> None:
    """LoRA on all matrices loses about as many adapter parameters per cost in every group."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    config = LlamaConfig(
        **sizes, vocab_size=32000, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    run = settings(lora__targets="all", lora__rank=8, pruning__selection=selection)
    with described(tmp_path) as folder:
        plan = OpenedModel(folder).plan
    least, most = (numbers_of(run, plan, cut) for cut in cuts(run, 0.5, plan))
    assert 0.98 * most < least < most


def test_message_overhead_widens_bounds() -> None:
    """600 bytes more or less around the parts of a run are 50 parameters of rank 3 in float32."""
    run = settings(lora__targets="attn.v,mlp.down", pruning__selection="global")
    narrow = [numbers_of(run, PLAN, cut) for cut in cuts(run, 0.45)]
    wide = [numbers_of(run, PLAN, cut) for cut in cuts(run, 0.45, around_parts=600)]
    assert narrow[0] - wide[0] >= 3 * 50 <= wide[1] - narrow[1]
