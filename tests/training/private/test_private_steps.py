"""DP-SGD: gradients of records against a slow loop, clipping, noise and steps by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.privacy.noise import SeededBits
from espalier.training.adapted_model import flattened
from espalier.training.loss import num_counted, summed_loss
from espalier.training.private.steps import PrivateSteps
from tests.hf.tiny_models import llama_config, save_model
from tests.training.adapters.test_adapter_training import opt_config, start_of, training_of

pytest.importorskip("opacus", reason="needs the extra privacy")

CPU = torch.device("cpu")
ONE = 2.0**40
RECORDS = [[0], [1, 2], [3], [4, 5], [6]]
"""Records of one and of two sequences."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    config = llama_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    return OpenedModel(save_model(tmp_path_factory.mktemp("llama"), config))


def steps_of(
    model: OpenedModel,
    noise_multiplier: float = 1.5,
    clip_norm: float = 0.7,
    sampling_rate: float = 1.0,
    max_sequences: int = 2,
    records: list[list[int]] = RECORDS,
    **changes: Any,
) -> PrivateSteps:
    training = training_of(model, **{"lora__dropout": 0.0, "training__batch_size": 3} | changes)
    adapted = training.adapted
    adapted.set(start_of(training))
    return PrivateSteps(
        model=adapted.whole,
        parameters=flattened(adapted.parameters),
        settings=training.settings.training,
        sequences=training.sequences,
        records=records,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampling_rate=sampling_rate,
        max_sequences=max_sequences,
        total_steps=6,
    )


def gradient_of(steps: PrivateSteps, record: list[int]) -> dict[str, Tensor]:
    """Return the mean gradient of one record, sequence by sequence, in float64."""
    found = {name: torch.zeros_like(value).double() for name, value in steps.parameters.items()}
    counted = 0
    steps.model.train()
    for number in record:
        batch = steps.sequences.batch([number])
        for value in steps.parameters.values():
            value.grad = None
        summed_loss(steps.model, batch, CPU).backward()
        for name, value in steps.parameters.items():
            assert value.grad is not None
            found[name] += value.grad.double()
            value.grad = None
        counted += num_counted(batch)
    steps.model.eval()
    return {name: value / counted for name, value in found.items()}


def slow_sum(steps: PrivateSteps, records: list[list[int]]) -> dict[str, Tensor]:
    """Return the sum of clipped gradients in units of the clipping norm."""
    total = {name: torch.zeros_like(value).double() for name, value in steps.parameters.items()}
    for record in records:
        own = gradient_of(steps, record)
        norm = sum(float(value.square().sum()) for value in own.values()) ** 0.5
        for name, value in own.items():
            total[name] += value / max(norm, steps.clip_norm)
    return total


def norm_of(sums: dict[str, Tensor]) -> float:
    return sum(float((value.double() / ONE).square().sum()) for value in sums.values()) ** 0.5


@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("clip_norm", [0.05, 1000.0])
def test_sums_are_those_of_single_backward_passes(
    llama: OpenedModel, base: str, clip_norm: float
) -> None:
    """A small bound clips every record, a large one none."""
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    steps = steps_of(llama, clip_norm=clip_norm, training__base=base)
    norms = [
        sum(float(value.square().sum()) for value in gradient_of(steps, record).values()) ** 0.5
        for record in RECORDS
    ]
    assert all(norm > 0.05 for norm in norms)
    assert all(norm < 1000 for norm in norms)
    found = sum_of(steps, RECORDS)
    for name, expected in slow_sum(steps, RECORDS).items():
        error = (found[name].double() / ONE - expected).norm() / expected.norm().clamp(min=1e-12)
        assert error < 2e-5, name


def sum_of(steps: PrivateSteps, records: list[list[int]]) -> dict[str, Tensor]:
    with steps._gradients_of_sequences():
        return steps.clipped_sum(records)


def test_a_group_counts_once_however_many_records_it_has(llama: OpenedModel) -> None:
    steps = steps_of(llama, clip_norm=0.01, training__batch_size=8)
    for group in ([0], [0, 1, 2], list(range(7))):
        assert 0.99 < norm_of(sum_of(steps, [group])) <= 1
    # As records of their own, the same sequences count seven times.
    assert norm_of(sum_of(steps, [[number] for number in range(7)])) > 1.5


def test_one_more_record_changes_the_sum_by_the_bound_at_most(llama: OpenedModel) -> None:
    steps = steps_of(llama, clip_norm=0.01)
    before, after = sum_of(steps, RECORDS[:4]), sum_of(steps, RECORDS)
    difference = norm_of({name: after[name] - before[name] for name in after})
    # The batch of the others is the same, so nothing but the record differs.
    assert 0.99 < difference <= 1 + 1e-6


@pytest.mark.parametrize(("of_adapters", "of_the_base"), [(0.5, 0.0), (0.0, 0.5)])
def test_dropout_changes_no_other_record(
    tmp_path: Path, of_adapters: float, of_the_base: float
) -> None:
    """One more record at the beginning would move the random numbers of all others.

    Settings refuse dropout of adapters; a base model may have dropout of its own.
    """
    config = llama_config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, attention_dropout=of_the_base
    )
    model = OpenedModel(save_model(tmp_path, config))
    steps = steps_of(model, clip_norm=0.01, lora__dropout=of_adapters)
    rows = [[number] for number in range(7)]
    before, after = sum_of(steps, rows[1:]), sum_of(steps, rows)
    difference = norm_of({name: after[name] - before[name] for name in after})
    assert 0.99 < difference <= 1 + 1e-6


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_no_record_changes_another(llama: OpenedModel, base: str, scale: float) -> None:
    """The sum is that of single records, bit for bit, also with adapters made to amplify."""
    steps = steps_of(llama, training__base=base, training__batch_size=7)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in steps.parameters.values():
            value.copy_(0.05 * scale * torch.randn(value.shape, generator=generator))
    records = [[number] for number in range(7)]
    together = sum_of(steps, records)
    alone = [sum_of(steps, [record]) for record in records]
    for name, value in together.items():
        assert torch.equal(value, torch.stack([own[name] for own in alone]).sum(dim=0))


def test_no_record_gives_zeros(llama: OpenedModel) -> None:
    assert norm_of(sum_of(steps_of(llama), [])) == 0


def test_steps_are_adamw_on_the_noisy_sum(llama: OpenedModel) -> None:
    """One step by hand: the sum, noise from the same source, divided by public numbers."""
    steps = steps_of(llama, noise_multiplier=1.5, training__learning_rate=0.01)
    names = sorted(steps.parameters)
    total = sum_of(steps, RECORDS)
    bits = SeededBits(1, 2, 3)
    expected = [steps.parameters[name].detach().clone().requires_grad_() for name in names]
    optimizer = torch.optim.AdamW(expected, lr=0.01, betas=(0.9, 0.999), weight_decay=0.0)
    assert bits.sampled(len(RECORDS), 1.0) == list(range(5))
    for name, value in zip(names, expected, strict=True):
        noise = torch.from_numpy(bits.grid_noise(value.numel(), 1.5)).view(value.shape)
        value.grad = ((total[name] + noise).double() / (1.5 * ONE)).float()
    optimizer.step()
    steps.run(0, 1, SeededBits(1, 2, 3))
    for name, value in zip(names, expected, strict=True):
        torch.testing.assert_close(steps.parameters[name].detach(), value.detach())


def test_training_repeats_with_the_same_source(llama: OpenedModel) -> None:
    def trained(seed: int) -> list[Tensor]:
        steps = steps_of(llama, sampling_rate=0.5)
        steps.run(0, 3, SeededBits(seed, 0, 1))
        return [value.detach().clone() for _, value in sorted(steps.parameters.items())]

    one, again, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(*pair) for pair in zip(one, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_nothing_of_opacus_stays_on_the_model(llama: OpenedModel) -> None:
    """The model stays in memory, and may train without privacy afterwards."""
    steps = steps_of(llama)
    steps.run(0, 1, SeededBits(0, 0, 1))
    assert not hasattr(steps.model, "autograd_grad_sample_hooks")
    for value in steps.parameters.values():
        assert value.grad is None
        assert not hasattr(value, "grad_sample")
    assert not any(
        module._backward_hooks or module._forward_hooks for module in steps.model.modules()
    )


def test_a_model_whose_gradients_mix_sequences_is_refused(tmp_path: Path) -> None:
    """OPT's feed-forward part sees the tokens of all sequences in one dimension."""
    model = OpenedModel(save_model(tmp_path, opt_config()))
    steps = steps_of(model, lora__targets="mlp.up")
    with pytest.raises(EspalierError, match=r"lora\.targets: .* several sequences at once"):
        steps.require_gradients_of_sequences()
    steps_of(model, lora__targets="attn.q").require_gradients_of_sequences()
