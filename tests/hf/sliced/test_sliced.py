"""Sliced models against dense models with a projected residual stream, and in transformers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from espalier.errors import EspalierError
from espalier.hf.export.model import check_export, export_edited, logits_of
from espalier.hf.nf4.folder import write_quantised
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced.export import export_sliced
from espalier.hf.sliced.rotated_checkpoint import SlicedModel
from espalier.hf.sliced.signals import basis_of, mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from espalier.hf.whole.model import load_whole
from espalier.models.structure import Structure
from tests.hf.structured.structured_models import DECODERS
from tests.hf.tiny_models import CPU, llama_config, save_model, token_sequences, whole_model

FAMILIES = (
    "llama", "llama with biases", "mistral", "qwen2", "qwen3", "granite", "smollm3", "phi3",
)  # fmt: skip
"""Families with grouped queries.

"llama with biases" has a tied head and biases on the residual stream; mistral and qwen2 have
sliding windows.
"""
SAMPLES = token_sequences(6, 20)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedModel]:
    """Dense models, one per family, in several shards."""
    folder = tmp_path_factory.mktemp("dense")
    return {
        name: OpenedModel(save_model(folder / name, DECODERS[name], max_shard_size="40KB"))
        for name in FAMILIES
    }


def found_bases(model: OpenedModel, width: int) -> list[Tensor]:
    """Return the basis of each place in the residual stream."""
    return [
        basis_of(moments, width)[0] for moments in mean_moments(BlockStream(model, CPU), SAMPLES)
    ]


def exported(model: OpenedModel, width: int, folder: Path) -> Path:
    export_sliced(SlicedModel(model, found_bases(model, width).__getitem__, width), folder)
    return folder


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return whole_model(folder)(input_ids=SAMPLES).logits


def project(model: Any, found: Sequence[Tensor]) -> None:
    """Project the residual stream of a dense model onto the basis of each norm.

    Hooks do this; nothing is rotated.
    """
    onto = [basis.double() @ basis.double().T for basis in found]
    seen: dict[str, Tensor] = {}
    # Granite scales what a block adds.
    scale = getattr(model.config, "residual_multiplier", 1.0)

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["residual"] = inputs[0]

    def led_on(place: int) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> Any:
            added = output[0] if isinstance(output, tuple) else output
            projected = (seen["residual"] + scale * added) @ onto[place]
            changed = (projected - seen["residual"]) / scale
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: output @ onto[0])
    for index, block in enumerate(model.model.layers):
        for step, (norm, part) in enumerate(
            ((block.input_layernorm, block.self_attn), (block.post_attention_layernorm, block.mlp))
        ):
            norm.register_forward_pre_hook(note)
            part.register_forward_hook(led_on(2 * index + step + 1))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_rotated_model_gives_dense_logits(
    bases: dict[str, OpenedModel], name: str, tmp_path: Path
) -> None:
    expected = logits(bases[name].directory)
    torch.testing.assert_close(
        logits(exported(bases[name], 32, tmp_path / "same")), expected, rtol=1e-5, atol=5e-5
    )


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_sliced_model_is_a_projected_dense_one(
    bases: dict[str, OpenedModel], name: str, tmp_path: Path
) -> None:
    base = bases[name]
    small = SlicedModel(base, found_bases(base, 24).__getitem__, 24)
    export_sliced(small, tmp_path / "small")
    whole = whole_model(base.directory, torch.float64)
    project(whole, found_bases(base, 24))
    expected = whole(input_ids=SAMPLES).logits
    torch.testing.assert_close(logits(tmp_path / "small").double(), expected, rtol=1e-4, atol=1e-4)
    assert (expected - logits(base.directory)).abs().max() > 0.1
    check_export(BlockStream(small, CPU), dense, tmp_path / "small", SAMPLES[:2])


def test_signals_equal_norm_outputs_unscaled(bases: dict[str, OpenedModel]) -> None:
    """Second moments equal those of a whole model in memory; moments of batches add up."""
    base = bases["llama"]
    whole = whole_model(base.directory)
    found = list[Tensor]()
    norms = [
        norm
        for block in whole.model.layers
        for norm in (block.input_layernorm, block.post_attention_layernorm)
    ]
    for norm in (*norms, whole.model.norm):
        norm.register_forward_hook(
            lambda norm, _, output: found.append((output / norm.weight).flatten(0, -2).double())
        )
    with torch.no_grad():
        whole(input_ids=SAMPLES)
    moments = list(mean_moments(BlockStream(base, CPU), SAMPLES))
    assert len(moments) == len(found) == 9
    for mean, signals in zip(moments, found, strict=True):
        torch.testing.assert_close(
            mean, signals.T @ signals / SAMPLES.numel(), rtol=1e-4, atol=1e-5
        )
        assert float(mean.trace()) <= 32 + 1e-9
    parts = [
        list(mean_moments(BlockStream(base, CPU), samples))
        for samples in (SAMPLES[:2], SAMPLES[2:])
    ]
    for mean, first, second in zip(moments, *parts, strict=True):
        torch.testing.assert_close(mean, (2 * first + 4 * second) / 6, rtol=1e-5, atol=1e-7)


def test_what_is_written(bases: dict[str, OpenedModel], tmp_path: Path) -> None:
    base = bases["llama with biases"]
    folder = exported(base, 24, tmp_path / "small")
    small = OpenedModel(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["dense_hidden_size"]) == (
        "sliced-llama",
        24,
        32,
    )
    assert (config["head_dim"], config["tie_word_embeddings"]) == (8, False)
    assert {file.name for file in folder.iterdir()} >= {
        "modeling_sliced.py",
        "tokenizer.json",
        "model.safetensors.index.json",
    }
    counted = sum(parameter.numel() for parameter in whole_model(folder).parameters())
    assert small.plan.num_parameters == counted
    block = small.plan.blocks[0]
    assert block.linear("attn.q").shape == (64, 24)
    assert block.linear("mlp.down").shape == (24, 48)
    assert dict(block.others)["attn_shortcut.weight"] == (24, 24)
    for norm in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert small.checkpoint.read(norm).tolist() == [1.0] * 24
    again = exported(base, 24, tmp_path / "again")
    assert [file.read_bytes() for file in sorted(again.iterdir())] == [
        file.read_bytes() for file in sorted(folder.iterdir())
    ]


@torch.no_grad()
def test_unread_tensor_may_hold_anything(bases: dict[str, OpenedModel], tmp_path: Path) -> None:
    """As old buffers do: transformers passes it over, and so does the check of what is made."""
    name, base = "model.layers.0.self_attn.rotary_emb.inv_freq", bases["llama"]
    shutil.copytree(base.directory, tmp_path / "base")
    weights = min((tmp_path / "base").glob("*.safetensors"))
    save_file(load_file(weights) | {name: torch.full((4,), torch.nan)}, weights, {"format": "pt"})
    folder = exported(OpenedModel(tmp_path / "base"), 24, tmp_path / "small")
    torch.testing.assert_close(logits(folder), logits(exported(base, 24, tmp_path / "without")))


def test_cached_generation_equals_uncached(bases: dict[str, OpenedModel], tmp_path: Path) -> None:
    model = whole_model(exported(bases["qwen2"], 24, tmp_path / "small"))
    words = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cached, anew = (
        model.generate(SAMPLES[:2, :6], use_cache=cache, **words) for cache in (True, False)
    )
    assert cached.shape == (2, 18)
    assert torch.equal(cached, anew)


@torch.no_grad()
def test_it_is_loaded_for_tuning(bases: dict[str, OpenedModel], tmp_path: Path) -> None:
    """Tuning loads it whole, like any base; it can also be edited, exported and reopened."""
    folder = exported(bases["mistral"], 24, tmp_path / "small")
    small = OpenedModel(folder)
    torch.testing.assert_close(
        load_whole(small, CPU, "float32")(input_ids=SAMPLES).logits, logits(folder)
    )
    export_edited(small, dense, tmp_path / "copy")
    assert torch.equal(logits(tmp_path / "copy"), logits(folder))


@torch.no_grad()
def test_sliced_models_work_with_nf4(tmp_path: Path) -> None:
    """NF4 of a sliced model loads in transformers, and an NF4 base can be sliced, in float32."""
    sizes = {"hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 1}
    base = OpenedModel(save_model(tmp_path / "base", llama_config(**sizes)))
    small = OpenedModel(exported(base, 128, tmp_path / "small"))
    write_quantised(small, tmp_path / "nf4", True)
    held = load_whole(OpenedModel(tmp_path / "nf4"), CPU, "nf4")(input_ids=SAMPLES).logits
    torch.testing.assert_close(load_whole(small, CPU, "nf4")(input_ids=SAMPLES).logits, held)
    plain = whole_model(tmp_path / "nf4")
    # Switch off the repacking on CPUs with AVX512-BF16 (see ``linear_of``).
    for module in plain.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    assert torch.equal(plain(input_ids=SAMPLES).logits, held)
    write_quantised(base, tmp_path / "base-nf4", True)
    made = OpenedModel(exported(OpenedModel(tmp_path / "base-nf4"), 192, tmp_path / "same"))
    assert {stored.dtype for stored in made.checkpoint.tensors.values()} == {"F32"}
    expected = logits_of(BlockStream(OpenedModel(tmp_path / "base-nf4"), CPU), SAMPLES, dense)
    torch.testing.assert_close(
        logits(tmp_path / "same").flatten(0, 1), torch.cat(list(expected)), rtol=1e-4, atol=1e-4
    )


def test_unsliceable_model_is_told_alternatives(tmp_path: Path) -> None:
    model = OpenedModel(save_model(tmp_path / "opt", DECODERS["opt"]))
    with pytest.raises(
        EspalierError,
        match=r"model_type = 'opt': .*only RMS norms.* llama, mistral, qwen2, qwen3, .*name one",
    ):
        SlicedModel(model, lambda place: torch.eye(32), 32)


def test_sliced_model_is_not_cut_again(bases: dict[str, OpenedModel], tmp_path: Path) -> None:
    small = OpenedModel(exported(bases["llama"], 24, tmp_path / "small"))
    with pytest.raises(
        EspalierError,
        match=r"model_type = 'sliced-llama': groups and blocks cannot be removed .*name the model",
    ):
        OpenedModel(small.directory, Structure.whole(small.plan).with_blocks([0, 1]))
    with pytest.raises(EspalierError, match=r"model_type = 'sliced-llama': .*as they were trained"):
        SlicedModel(small, lambda place: torch.eye(24), 24)


def test_a_model_without_its_head_is_refused(bases: dict[str, OpenedModel]) -> None:
    model = OpenedModel(bases["llama"].directory)
    model.checkpoint.tensors.pop("lm_head.weight")
    with pytest.raises(EspalierError, match=r"tensor lm_head.weight is missing: the files contain"):
        SlicedModel(model, lambda place: torch.eye(32), 32)
