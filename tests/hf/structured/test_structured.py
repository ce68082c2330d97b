"""Smaller models equal their base with zeros, and only the tensors' kept parts are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from espalier.errors import EspalierError
from espalier.evaluation.perplexity import mean_losses
from espalier.hf.nf4.cache import key_parts, quantised_linears
from espalier.hf.nf4.matrices import quantise
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.structured.cut_checkpoint import stretches
from espalier.hf.structured.selection import open_cut
from espalier.hf.whole.model import load_whole
from espalier.messages.blobs.cuts import pack_cut
from espalier.models.adapters import adapter_plan
from espalier.models.groups import Groups
from espalier.models.structure import GROUP_KINDS, Structure, structured_plan
from espalier.settings.run import parse
from espalier.settings.tables.lora import LoraSettings
from espalier.storage.tensor_cache import cache_key
from espalier.training.adapted_model import AdaptedModel
from tests.hf.structured.structured_models import DECODERS, ENCODERS, WITH_RESIDUAL, masked, uneven
from tests.hf.tiny_models import CPU, llama_config, save_model, token_sequences, whole_model

CASES = [(name, False) for name in DECODERS] + [(name, True) for name in WITH_RESIDUAL]


@pytest.mark.parametrize(("name", "residual"), CASES)
@torch.no_grad()
def test_sliced_equals_masked_in_all_uses(
    saved: dict[str, Path], name: str, residual: bool
) -> None:
    base = OpenedModel(saved[name])
    structure = uneven(base, residual=residual)
    expected = masked(whole_model(base.directory), base, structure)
    small = OpenedModel(base.directory, structure)
    whole = load_whole(small, CPU, "float32")
    samples = token_sequences(3, 9)
    wanted = expected(input_ids=samples, use_cache=False).logits
    torch.testing.assert_close(
        whole(input_ids=samples, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5
    )
    stream = BlockStream(small, CPU)
    streamed = torch.cat(list(stream.logits(run_through(stream, samples)))).view_as(wanted)
    torch.testing.assert_close(streamed, wanted, rtol=1e-5, atol=1e-5)
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    prompt = samples[:, :4]
    seen = torch.ones(3, 4, dtype=torch.int64)
    found = whole.generate(prompt, attention_mask=seen, use_cache=True, **how)
    assert torch.equal(found, expected.generate(prompt, attention_mask=seen, use_cache=True, **how))
    assert torch.equal(found, whole.generate(prompt, attention_mask=seen, use_cache=False, **how))


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_a_sliced_encoder_is_a_masked_one(saved: dict[str, Path], name: str) -> None:
    base = OpenedModel(saved[name])
    structure = uneven(base)
    small = load_whole(OpenedModel(base.directory, structure), CPU, "float32", num_labels=3)
    whole = AutoModelForSequenceClassification.from_pretrained(base.directory, num_labels=3).eval()
    heads = {
        key: value
        for key, value in small.state_dict().items()
        if key.startswith(("classifier", "bert.pooler"))
    }
    whole.load_state_dict(heads, strict=False)
    samples = token_sequences(3, 9)
    wanted = masked(whole, base, structure)(input_ids=samples).logits
    torch.testing.assert_close(small(input_ids=samples).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "residual"), [*CASES, *((name, False) for name in ENCODERS)])
def test_plan_and_parameters_follow_structure(
    saved: dict[str, Path], name: str, residual: bool
) -> None:
    base = OpenedModel(saved[name])
    structure = uneven(base, residual=residual)
    small = OpenedModel(base.directory, structure)
    built = small.new_skeleton(2 if name in ENCODERS else None)
    heads = ("classifier", "bert.pooler")
    counted = sum(
        value.numel() for key, value in built.named_parameters() if not key.startswith(heads)
    )
    assert small.plan.num_parameters == counted
    assert small.plan == structured_plan(base.plan, structure)
    read = {key: stored.shape for key, stored in small.checkpoint.tensors.items()}
    for block in small.plan.blocks:
        for linear in block.linears:
            assert read[linear.parameter] == linear.shape
    assert all(tuple(small.checkpoint.read(key).shape) == shape for key, shape in read.items())


def test_nested_structures_compose(saved: dict[str, Path]) -> None:
    base = OpenedModel(saved["qwen2"])
    inner = uneven(base, residual=True)
    middle = OpenedModel(base.directory, inner)
    outer = (
        Structure.whole(middle.plan)
        .keeping({0: {"channels": [1, 2]}, 2: {"attn_reads": [0, 4]}})
        .with_blocks([0, 2])
    )
    both = outer.of(inner)
    assert [block.source for block in both.blocks] == [0, 3]
    assert both.blocks[0].channels == (3, 6)
    assert both.blocks[1].attn_reads == (0, 4)
    assert structured_plan(base.plan, both) == structured_plan(middle.plan, outer)
    with pytest.raises(EspalierError, match="it does not fit the model that it is applied to"):
        inner.of(inner)


def test_tensors_read_in_pieces_are_the_same(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with whole tensors that torch indexes; short reads and skipped gaps are covered."""
    monkeypatch.setattr("espalier.hf.structured.cut_checkpoint.CHUNK", 700)
    monkeypatch.setattr("espalier.hf.structured.cut_checkpoint.GAP", 128)
    base = OpenedModel(saved["llama with biases"])
    structure = uneven(base, residual=True)
    small = OpenedModel(base.directory, structure)
    for name, part in small.checkpoint.parts.items():  # type: ignore[attr-defined]
        expected = base.checkpoint.read(part.source)
        expected = expected if part.rows is None else expected[torch.tensor(part.rows)]
        expected = expected if part.columns is None else expected[:, torch.tensor(part.columns)]
        assert torch.equal(small.checkpoint.read(name), expected)
        assert torch.equal(small.checkpoint.read_rows(name, 1, 3), expected[1:3])
        raw = b"".join(small.checkpoint.chunks(name))
        assert raw == expected.contiguous().numpy().tobytes()


def test_stretches_by_hand() -> None:
    """Rows of 32 KiB: a gap of two rows is read along, one of three is not; at most 512 rows."""
    assert list(stretches([0, 3, 4, 8], 32 * 1024)) == [(0, 5, 0, 3), (8, 9, 3, 4)]
    assert list(stretches(range(600), 32 * 1024)) == [(0, 512, 0, 512), (512, 600, 512, 600)]
    assert list(stretches([7], 1 << 30)) == [(7, 8, 0, 1)]


def test_given_tensors_replace_slices(saved: dict[str, Path]) -> None:
    base = OpenedModel(saved["llama"])
    cut = uneven(base)
    structure = Structure(cut.base, cut.blocks, ("mlp.down",))
    prefix = "model.layers."
    fresh = torch.arange(32, dtype=torch.float32)
    given = {f"{prefix}{index}.mlp.down_proj.bias": fresh + index for index in range(3)}
    given |= {f"{prefix}1.self_attn.k_proj.weight": torch.full((8, 32), 0.25)}
    small = OpenedModel(base.directory, structure, given)
    whole = load_whole(small, CPU, "float32")
    block = whole.model.layers[1]
    assert torch.equal(block.mlp.down_proj.bias, fresh + 1)
    assert torch.equal(block.self_attn.k_proj.weight, given[f"{prefix}1.self_attn.k_proj.weight"])
    assert small.plan.num_parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert (
        small.sha256
        != OpenedModel(
            base.directory, structure, given | {f"{prefix}0.mlp.down_proj.bias": fresh + 9}
        ).sha256
    )


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_group_scales_go_into_reading_columns(
    saved: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales multiply the columns that read each kept group, in values, bytes and hash."""
    monkeypatch.setattr("espalier.hf.structured.cut_checkpoint.CHUNK", 700)
    base = OpenedModel(saved[name])
    structure = uneven(base, drop=False)
    expected = masked(whole_model(base.directory), base, structure)
    scales = []
    generator = torch.Generator().manual_seed(5)
    for block in structure.blocks:
        scales.append(
            {
                kind: torch.randn(getattr(structure.base[block.source], kind), generator=generator)
                for kind in GROUP_KINDS
            }
        )
        for kind, linear, size in (
            ("groups", "attn.o", base.plan.heads_per_group * base.plan.head_dim),
            ("channels", "mlp.down", 1),
        ):
            module = expected.get_submodule(
                f"{base.family.blocks}.{block.source}.{base.family.linears[linear]}"
            )
            for unit, scale in enumerate(scales[-1][kind].tolist()):
                module.weight[:, unit * size : (unit + 1) * size] *= scale
    groups = Groups.of(base.plan)
    cut = ~groups.none
    for block in structure.blocks:
        for kind in GROUP_KINDS:
            cut[groups.at(block.source, kind)][list(block.kept(kind))] = False
    blobs = [
        pack_cut(
            groups,
            cut,
            index,
            scales={
                kind: np.where(cut[groups.at(index, kind)], 0, own.numpy()).astype(np.float32)
                for kind, own in values.items()
            },
        )
        for index, values in enumerate(scales)
    ]
    small = open_cut(base, blobs.__getitem__, ())
    samples = token_sequences(3, 9)
    wanted = expected(input_ids=samples, use_cache=False).logits
    found = load_whole(small, CPU, "float32")(input_ids=samples, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for linear in small.plan.blocks[0].linears:
        assert (
            b"".join(small.checkpoint.chunks(linear.parameter))
            == small.checkpoint.read(linear.parameter).numpy().tobytes()
        )
    assert small.sha256 != OpenedModel(base.directory, structure).sha256


def test_nf4_is_quantised_after_slicing(tmp_path: Path) -> None:
    base = OpenedModel(save_wide(tmp_path / "base"))
    structure = (
        Structure.whole(base.plan)
        .keeping({1: {"channels": range(64, 192), "groups": [1]}})
        .with_blocks([1, 2])
    )
    small = OpenedModel(base.directory, structure)
    assert cache_key(key_parts(small)) != cache_key(key_parts(base))
    made = dict(quantised_linears(small, CPU.device, tmp_path / "cache"))
    kept = dict(quantised_linears(small, CPU.device, tmp_path / "cache"))
    for linear, matrix in made.items():
        value = small.checkpoint.read(linear.parameter)
        expected = quantise([value.reshape(-1)], linear.shape, CPU.device)
        for one in (matrix, kept[linear]):
            assert all(
                torch.equal(one.tensors[key], tensor) for key, tensor in expected.tensors.items()
            )
    whole = load_whole(small, CPU, "nf4", cache_folder=tmp_path / "cache")
    assert torch.isfinite(whole(input_ids=token_sequences(2, 5)).logits).all()


def save_wide(folder: Path) -> Path:
    """Save a LLaMA whose matrices stay whole NF4 blocks when 64 channels or one group are cut."""
    from tests.hf.structured.structured_models import SIZES

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return save_model(folder, llama_config(**SIZES | sizes))


def test_lora_trains_in_smaller_structure(saved: dict[str, Path]) -> None:
    base = OpenedModel(saved["qwen2"])
    small = OpenedModel(base.directory, uneven(base, residual=True))
    lora = LoraSettings(rank=1, targets="all")
    adapters = adapter_plan(small.plan, lora)
    assert adapters.shapes()["block-0001"]["mlp.down.lora_a"] == (1, 5)
    settings = parse({"method": "fedpetuning", "lora.rank": 1, "lora.targets": "all"})
    adapted = AdaptedModel.load(small, CPU, settings, adapters)
    loss = adapted.whole(input_ids=token_sequences(2, 7), labels=token_sequences(2, 7)).loss
    loss.backward()
    gradients = {
        name: value.grad for block in adapted.parameters.values() for name, value in block.items()
    }
    assert all(
        gradient is not None and torch.isfinite(gradient).all() for gradient in gradients.values()
    )


def test_smaller_model_has_the_masked_losses(saved: dict[str, Path]) -> None:
    small = OpenedModel(saved["mistral"], uneven(OpenedModel(saved["mistral"])))
    samples = token_sequences(5, 8)
    (found,) = mean_losses(BlockStream(small, CPU), {"text": samples}).values()
    whole = load_whole(small, CPU, "float32")
    with torch.no_grad():
        expected = (
            torch.stack(
                [whole(input_ids=sample[None], labels=sample[None]).loss for sample in samples]
            )
            .mean()
            .item()
        )
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_structure_of_another_model_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    structure = Structure.whole(OpenedModel(save_wide(tmp_path)).plan)
    with pytest.raises(
        EspalierError, match="structure: it is of a model with blocks of other sizes"
    ):
        OpenedModel(saved["llama"], structure)


@pytest.mark.parametrize("name", ["opt", "bert"])
def test_residual_cut_needs_pre_norms(saved: dict[str, Path], name: str) -> None:
    base = OpenedModel(saved[name])
    with pytest.raises(
        EspalierError, match="residual dimensions can be removed only in models like LLaMA"
    ):
        OpenedModel(base.directory, uneven(base, residual=True))
