"""Demo model that ships with the package."""

import json

import torch

from espalier.data.public_text import public_text
from espalier.data.samples import evaluation_samples
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.models.structure import sizes_of
from espalier_assets import DEMO_MODEL


def test_it_is_a_small_bf16_llama_with_gqa() -> None:
    model = open_model("demo")
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= 8_000_000
    assert {stored.dtype for stored in model.checkpoint.tensors.values()} == {"BF16"}
    assert 3_500_000 < model.plan.num_parameters < 4_500_000
    assert (sizes_of(model.plan, model.plan.blocks[0]).groups, model.plan.heads_per_group) == (4, 2)


def test_held_out_perplexity_is_as_documented() -> None:
    """Other Python versions have slightly different documentation, so the value may differ."""
    model = open_model("demo")
    samples = evaluation_samples(
        public_text("documentation", ""), model.encode, 256, 24, "documentation"
    )
    loss = mean_losses(
        BlockStream(model, Computing(torch.device("cpu"), torch.float32, 2)),
        {"documentation": samples},
    )
    reported = json.loads(DEMO_MODEL.with_suffix(".json").read_text())["held_out_perplexity"]
    assert abs(perplexity(loss["documentation"]) / reported - 1) < 0.15
