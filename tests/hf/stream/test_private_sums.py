"""Noisy sums of records: directions by a plain loop, a bound on each record, and noise."""

import math
from collections.abc import Sequence

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.data.privacy_units import padded
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.pooled_sums import dense_sums
from espalier.hf.stream.private_sums import PrivateSums
from espalier.messages.tensor_blobs import views
from espalier.methods.pruning.pooled_pruning import num_inputs, squares_name
from espalier.privacy.noise import Integers, SeededBits
from pruning_kernels.fixed_point import from_words
from tests.hf.tiny_models import CPU, VOCABULARY, llama_config, save_model
from tests.training.adapters.test_adapter_training import opt_config

pytest.importorskip("scipy", reason="needs the extra privacy")

Sums = list[dict[str, Tensor]]
"""Sums of each block by the first matrix of each input."""


class NoNoise(SeededBits):
    """Source without noise."""

    def grid_noise(self, number: int, deviation: float) -> Integers:
        found: NDArray = super().grid_noise(number, deviation) * 0
        return found


@pytest.fixture(scope="module", params=["llama", "opt"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    config = llama_config() if request.param == "llama" else opt_config()
    return OpenedModel(save_model(tmp_path_factory.mktemp(request.param), config))


def windows(seed: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(VOCABULARY, (length,), generator=generator).tolist())
        for length in lengths
    ]


def sums_of(
    model: OpenedModel,
    records: Sequence[Sequence[tuple[int, ...]]],
    bits: SeededBits | None = None,
    multiplier: float = 1.0,
) -> Sums:
    owner = [number for number, own in enumerate(records) for _ in own]
    rows = [window for own in records for window in own]
    samples, lengths = padded(rows, 16)
    bits = bits or NoNoise(0, 0, 0)
    private = PrivateSums(BlockStream(model, CPU), multiplier, bits)
    return [
        {
            name.removesuffix(".squares"): from_words(words, 40)
            for name, words in views(blob).items()
            if name != "count"
        }
        for blob in private.blobs(samples, lengths, owner)
    ]


def directions(model: OpenedModel, record: Sequence[tuple[int, ...]]) -> Sums:
    """Return the directions of one record, whose sequences pass one by one and without padding."""
    found: Sums = []
    for window in record:
        stream = BlockStream(model, CPU)
        for index, sums in enumerate(dense_sums(stream, torch.tensor([window]))):
            if index == len(found):
                found.append({name: torch.zeros_like(value) for name, value in sums.items()})
            for name, value in sums.items():
                found[index][name] += value
    return [{name: value / value.norm() for name, value in block.items()} for block in found]


def test_sums_are_those_of_records_one_by_one(model: OpenedModel) -> None:
    """Records of one to three sequences of unequal lengths; padding counts for nothing."""
    records = [windows(1, [9]), windows(2, [5, 12, 3]), windows(3, [16, 2]), windows(4, [7])]
    found = sums_of(model, records)
    for index, block in enumerate(found):
        for name, value in block.items():
            expected = sum(directions(model, own)[index][name] for own in records)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_a_record_may_continue_in_the_next_batch(
    model: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [windows(1, [8, 8]), windows(2, [8, 8, 8]), windows(3, [8])]
    whole = sums_of(model, records)
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 16)
    for one, other in zip(sums_of(model, records), whole, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6)


def test_a_group_counts_once_however_many_records_it_has(model: OpenedModel) -> None:
    for group in (windows(1, [8]), windows(1, [8, 9, 10, 11])):
        for block in sums_of(model, [group]):
            for value in block.values():
                assert 1 - 1e-9 < float(value.norm()) <= 1


def test_all_noise_together_has_the_multiplier_of_the_accounting(model: OpenedModel) -> None:
    """One record changes M vectors by norm 1 each, so the noise of each has sqrt(M) times more."""
    exact = sums_of(model, [windows(1, [8])])
    draws = []
    for seed in range(40):
        noisy = sums_of(model, [windows(1, [8])], SeededBits(seed, 0, 1), 0.5)
        draws += [
            noisy[index][name] - value
            for index, block in enumerate(exact)
            for name, value in block.items()
        ]
    noise = torch.cat(draws)
    expected = 0.5 * math.sqrt(num_inputs(model.plan))
    assert float(noise.std()) == pytest.approx(expected, rel=6 / (2 * len(noise)) ** 0.5)
    assert abs(float(noise.mean())) < 6 * expected / len(noise) ** 0.5


def test_without_a_sampled_record_only_noise_is_sent(model: OpenedModel) -> None:
    found = sums_of(model, [], SeededBits(1, 0, 1), 2.0)
    assert len(found) == len(model.plan.blocks)
    assert all(float(value.abs().max()) > 0 for block in found for value in block.values())
    assert squares_name("attn.q").removesuffix(".squares") in found[0]
    assert all(
        float(value.abs().max()) == 0 for block in sums_of(model, []) for value in block.values()
    )
