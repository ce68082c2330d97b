"""Benchmark of membership inference: scores by hand, and replies of a tiny model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.membership import clients as clients_module
from benchmarks.membership.__main__ import report
from benchmarks.membership.attacks import Outcome, resemblances, sample_losses
from benchmarks.membership.clients import Clients
from benchmarks.membership.kinds import (
    ADAPTERS,
    STATISTICS,
    TUNING,
    recognised_by_adapters,
    recognised_by_statistics,
)
from espalier.hf.machine.computing import Computing
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import parse
from tests.tiny_model import WORDS, save_tiny_llama

CPU = Computing(torch.device("cpu"), torch.float32, 1)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    """Return three clients of a tiny model with four samples each."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    passages = [f"{WORDS[number % 13]} {number}" for number in range(200)]
    monkeypatch.setattr(
        clients_module, "own_passages", lambda _, source, __: passages if source == 0 else []
    )
    made = Clients(
        str(save_tiny_llama(tmp_path / "model", hidden=32, positions=256)),
        "code",
        tmp_path / "texts",
        3,
        4,
        16,
    )
    made.deal()
    return made


def test_outcomes_by_hand() -> None:
    """The second member ranks behind one of two others; a draw does not count as ahead."""
    scores = torch.tensor([[0.3, 0.2, 0.1], [0.5, 0.4, 0.1], [0.2, 0.7, 0.7]])
    assert Outcome.of(scores) == Outcome(trials=3, first=1, ahead=4 / 6)


def test_resemblances_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    replies, candidates = (torch.randn(3, 2, 5, generator=generator) for _ in range(2))
    candidates[:, 1, 3] = 7.0
    found = resemblances(lambda part: replies[:, part], lambda part: candidates[:, part], 2)
    mean = candidates.flatten(1).mean(dim=0)
    spread = candidates.flatten(1).std(dim=0)
    for row, column in ((0, 0), (1, 2), (2, 1)):
        pairs = [
            (float((one - m) / s), float((other - m) / s))
            for one, other, m, s in zip(
                replies[row].flatten(), candidates[column].flatten(), mean, spread, strict=True
            )
            if s > 0
        ]
        assert len(pairs) == 9
        lengths = [sum(pair[side] ** 2 for pair in pairs) ** 0.5 for side in (0, 1)]
        expected = sum(one * other for one, other in pairs) / (lengths[0] * lengths[1])
        assert float(found[row, column]) == pytest.approx(expected, rel=1e-5)


def test_clients_have_equally_many_own_windows(clients: Clients) -> None:
    for method in ({"method": "fedprllm"}, {"method": "fedpetuning", "training.steps": 1}):
        run = parse(clients.settings(method))
        samples = [clients.known(run, client) for client in range(3)]
        assert [tuple(own.shape) for own in samples] == [(4, 16)] * 3
        assert len({tuple(sample.tolist()) for own in samples for sample in own}) == 12


@pytest.mark.parametrize("name", STATISTICS)
def test_knowing_all_windows_gives_the_reply(clients: Clients, name: str) -> None:
    """An attacker that knows all samples computes exactly the program's reply."""
    (all_known,) = recognised_by_statistics(clients, CPU, STATISTICS[name], [4])
    assert all_known == Outcome(3, 3, 1.0)


def test_window_losses_equal_transformers(clients: Clients) -> None:
    samples = torch.arange(24).view(2, 12)
    model = AutoModelForCausalLM.from_pretrained(clients.model, dtype=torch.float32)
    with torch.no_grad():
        expected = [
            float(model(input_ids=sample[None], labels=sample[None]).loss) for sample in samples
        ]
    found = sample_losses(BlockStream(clients.opened, CPU), samples)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_adapters_are_a_trial_for_each_client(clients: Clients) -> None:
    """The texts are similar here, so the sample ranks ahead of most others but not all."""
    outcome, compared = recognised_by_adapters(
        clients, CPU, {**TUNING, "training.steps": 20, "training.learning-rate": 2e-2}
    )
    assert outcome.trials == compared.trials == 3
    assert outcome.ahead > 0.5
    row = (
        f"| FedPETuning, one round's adapters | 1 of 4 | {outcome.first} of 3 |"
        f" {outcome.ahead:.0%} |"
    )
    assert row in report(clients, [(ADAPTERS, 1, outcome)])
