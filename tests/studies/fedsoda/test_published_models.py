"""Sizes of adapters in published models: by hand, and as FedSODA's paper prints them."""

import pytest

from benchmarks.models.published_models import SHAPES, Tuned, tuned
from espalier.messages.tensor_blobs import wire_specs
from espalier.settings.tables.federation import WireDtype
from espalier.settings.tables.lora import LoraSettings

FEDSODA = "attn.k,attn.v,attn.q,mlp.up,mlp.down"
"""The five matrices with which the paper's tables can be reproduced."""
LAST_THREE = {"llama3-8b": "29-31", "mistral-7b": "29-31", "qwen2-7b": "25-27"}


def tensor_bytes(found: Tuned, wire_dtype: WireDtype) -> int:
    """Return the bytes of the tensors, without headers."""
    blobs = (wire_specs(shapes, wire_dtype) for shapes in found.adapters.shapes().values())
    return sum(spec.num_bytes for blob in blobs for spec in blob.values())


def test_llama_7b_rank_8_on_queries_and_values() -> None:
    found = tuned("llama-7b", LoraSettings())
    assert found.trained == 2 * 32 * 8 * (4096 + 4096) == 4_194_304
    assert found.footprint.parameters == 6_738_415_616
    assert tensor_bytes(found, "float32") == 4 * 4_194_304
    assert tensor_bytes(found, "nf4") == 4_194_304 // 2 + 4 * 4_194_304 // 64


def test_layers_count() -> None:
    lora = LoraSettings(rank=4, targets="attn.q,mlp.down", layers="0,5")
    found = tuned("llama3-8b", lora)
    assert found.trained == 2 * 4 * (4096 + 4096 + 4096 + 14336)
    assert list(found.blob_bytes("float32")) == ["block-0000", "block-0005"]


def test_shape_totals_are_the_published_ones() -> None:
    published = {
        "llama-7b": 6.738e9,
        "llama3-8b": 8.030e9,
        "qwen2-7b": 7.616e9,
        "mistral-7b": 7.242e9,
    }
    assert set(published) == set(SHAPES)
    for name, parameters in published.items():
        assert tuned(name, LoraSettings()).footprint.parameters == pytest.approx(
            parameters, rel=0.0005
        )


@pytest.mark.parametrize(
    ("model", "per_layer"), [("llama3-8b", 442_368), ("mistral-7b", 442_368), ("qwen2-7b", 483_328)]
)
def test_figures_of_fedsoda(model: str, per_layer: int) -> None:
    """Parameters per layer and in total (the paper's 1.3 M and 1.4 M), at rank 8.

    Five of the seven matrices of a block are adapted.
    """
    found = tuned(model, LoraSettings(targets=FEDSODA, layers=LAST_THREE[model]))
    assert found.trained == 3 * per_layer
    one = tuned(model, LoraSettings(targets=FEDSODA, layers="7"))
    assert one.trained == per_layer


@pytest.mark.parametrize(
    ("model", "removed", "sampled", "interval", "printed"),
    [
        ("llama3-8b", 2, 6, 5, 1.519),
        ("llama3-8b", 3, 4, 5, 1.434),
        ("llama3-8b", 4, 3, 5, 1.392),
        ("llama3-8b", 3, 4, 2, 1.688),
        ("llama3-8b", 3, 4, 10, 1.350),
        ("qwen2-7b", 2, 6, 5, 1.659),
        ("qwen2-7b", 3, 4, 5, 1.567),
        ("qwen2-7b", 4, 3, 5, 1.521),
        ("qwen2-7b", 3, 4, 2, 1.844),
        ("qwen2-7b", 3, 4, 10, 1.475),
    ],
)
def test_megabytes_a_round_of_fedsoda(
    model: str, removed: int, sampled: int, interval: int, printed: float
) -> None:
    """Megabytes per round against the values that the paper prints.

    Each round sends three adapted layers up and down. Every ``interval`` rounds it also sends down
    the layers of the ``sampled`` groups of ``removed`` blocks. The paper counts half a byte per
    element; scales add 1/16 of a byte.
    """
    trained = tuned(model, LoraSettings(targets=FEDSODA, layers=LAST_THREE[model]))
    sent = tuned(model, LoraSettings(targets=FEDSODA, layers=f"0-{sampled - 1}"))
    megabytes = (2 * tensor_bytes(trained, "nf4") + tensor_bytes(sent, "nf4") / interval) / 2**20
    assert megabytes * 0.5 / 0.5625 == pytest.approx(printed, abs=0.0006)
