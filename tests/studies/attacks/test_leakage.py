"""Leakage benchmark: figures by hand, scores against plain algebra, and attacks on a tiny model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.leakage import __main__ as command
from benchmarks.leakage import likelihood
from benchmarks.leakage.canaries import canaries, exposure, exposures, insert
from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures, auc, figures, of_two, true_positives
from benchmarks.leakage.layer_replies import Layer
from benchmarks.leakage.private_sums import METHOD, PrivateSumsAttack, _exact
from benchmarks.leakage.statistics import StatisticsAttack
from benchmarks.leakage.statistics_kinds import KINDS, POOLED
from benchmarks.leakage.trained import TRAINED, TrainedAttack, mean_of, private_tuning
from benchmarks.leakage.trained_replies import Adapters, InnerMatrices
from benchmarks.membership import clients as clients_module
from benchmarks.membership.clients import Clients
from espalier.data.passages import is_held_out
from espalier.hf.group_scores.streamline import first_layer
from espalier.hf.machine.computing import Computing
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import parse
from tests.tiny_model import WORDS, save_tiny_llama

CPU = Computing(torch.device("cpu"), torch.float32, 1)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ----- figures ------------------------------------------------------------------------------------


def test_auc_counts_pairs() -> None:
    """Of six pairs 3 beats both, 1 beats neither and ties with one, 2 beats one."""
    assert auc(column(3, 1, 2), column(1, 2.5)) == pytest.approx((2 + 0.5 + 1) / 6)
    assert auc(column(0, 0), column(0, 0)) == 0.5


def test_true_positives_have_few_false_ones() -> None:
    """Of 200 others two may be above the threshold: it is the third largest, 198."""
    others = torch.arange(1.0, 201.0).double()
    assert true_positives(column(198, 198.5, 500, 3), others) == 0.5
    # Without room for a false positive the largest other value is the threshold.
    assert true_positives(column(4, 6), column(1, 5)) == 0.5


def test_used_one_of_two_data_sets() -> None:
    """Two sets of two samples; the first is used. Means: 2 and 1.5; of the first samples 1, 3."""
    scores = column(1, 3, 3, 0)[None]
    members = torch.tensor([[True, True, False, False]])
    assert of_two(scores, members, 2, 2) == 1.0
    assert of_two(scores, members, 2, 1) == 0.0
    assert figures(scores, members, 2) == Figures(2, 2, 0.625, 0.0, 1.0, 0.0)


# ----- scores -------------------------------------------------------------------------------------


def test_scores_equal_plain_algebra() -> None:
    generator = torch.Generator().manual_seed(0)
    replies, known, reference = (
        torch.randn(number, 7, generator=generator) for number in (2, 5, 20)
    )
    reference[:, 3] = 4.0
    center = torch.randn(7, generator=generator)
    halves = [slice(0, 3), slice(3, 7)]
    found = likelihood.scores_of(
        (replies[:, one], known[:, one], reference[:, one], center[one]) for one in halves
    )
    told = [place for place in range(7) if place != 3]
    mean = reference.mean(dim=0)[told].double()
    spread = reference.std(dim=0)[told].double()
    z = (reference[:, told].double() - mean) / spread
    covariance = z.T @ z / 20 + likelihood.RIDGE * torch.eye(6).double()
    inverse = torch.linalg.inv(covariance) * likelihood.RIDGE
    for row in range(2):
        for place in range(5):
            r = (replies[row, told].double() - center[told].double()) / spread
            x = (known[place, told].double() - mean) / spread
            expected = float(r @ inverse @ x / (x @ inverse @ x).sqrt())
            assert float(found[row, place]) == pytest.approx(expected, rel=1e-4)


def test_members_of_a_mean_are_found() -> None:
    """Means of 8 of 20 random vectors, with 2000 numbers each: members stand out."""
    generator = torch.Generator().manual_seed(1)
    known = torch.randn(20, 2000, generator=generator)
    reference = torch.randn(50, 2000, generator=generator)
    scores = likelihood.scores_of(
        [(known[:8].mean(dim=0)[None], known, reference, reference.mean(dim=0))]
    )
    assert auc(scores[0, :8], scores[0, 8:]) == 1.0


# ----- attacks on replies -------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSets:
    """Return two clients, two unused sets and two reference sets of a tiny model's text."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    passages = [f"{WORDS[number % 13]} {number}" for number in range(400)]
    monkeypatch.setattr(
        clients_module, "own_passages", lambda _, source, __: passages if source == 0 else []
    )
    model = save_tiny_llama(tmp_path / "model", blocks=4, hidden=32, positions=256)
    clients = Clients(str(model), "code", tmp_path / "texts", 6, 4, 16)
    clients.deal()
    return DataSets(clients, 2, 2, 2)


def test_members_are_those_of_the_replies(sets: DataSets) -> None:
    alone = sets.members(1)
    assert alone.shape == (2, 16)
    assert alone[0].tolist() == [True] * 4 + [False] * 12
    assert alone[1].tolist() == [False] * 4 + [True] * 4 + [False] * 8
    assert sets.members(2).tolist() == [[True] * 8 + [False] * 8]


@pytest.mark.parametrize("name", [POOLED, "LLM-Pruner, scores", "LLM-Streamline, similarities"])
def test_attacker_computes_the_client_s_reply(sets: DataSets, name: str) -> None:
    """The blobs are those of the app; the other kinds are tested in ``test_membership.py``."""
    kind = KINDS[name]
    run = parse(sets.clients.settings(kind.method))
    (sent,) = sets.clients.replies(kind.method, {}, [0])
    stream = BlockStream(sets.clients.opened, CPU)
    made = list(kind.recompute(stream, sets.clients.known(run, 0), run))
    assert made == [sent.blobs[key] for key in sorted(sent.blobs)]


def test_attack_on_sums(sets: DataSets) -> None:
    attack = StatisticsAttack(sets, KINDS[POOLED], CPU)
    alone = attack.alone()
    assert (alone.members, alone.others) == (8, 24)
    assert alone.auc > 0.9
    summed = attack.summed(2)
    assert (summed.members, summed.others) == (8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedSpine, bits of a cut", "FedSpine, losses"])
def test_attack_on_fedspine(sets: DataSets, name: str) -> None:
    """The replies are those of the app, read as the attacker's own."""
    attack = StatisticsAttack(sets, KINDS[name], CPU)
    (replies,) = attack.replies
    (known,) = attack.known
    assert (replies.shape, known.shape) == ((2, known.shape[1]), (16, known.shape[1]))
    found = attack.alone()
    assert (found.members, found.others) == (8, 24)
    assert 0.3 < found.auc <= 1


def test_attack_on_private_sums(sets: DataSets) -> None:
    """Replies are those of the app's own mechanism; more noise tells less."""
    pytest.importorskip("opacus", reason="needs the extra privacy")
    attack = PrivateSumsAttack(sets, CPU)
    assert attack.exact.alone().auc > 0.9
    assert attack.noise_multiplier(1.0) > attack.noise_multiplier(8.0) > 0
    assert attack.noisy(1, 0.1, seed=0).auc < attack.exact.alone().auc
    found = attack.noisy(2, 8.0, seed=0)
    assert (found.members, found.others) == (8, 8)
    assert found == attack.noisy(2, 8.0, seed=0)


def test_private_sums_without_noise_add_up(sets: DataSets) -> None:
    """The sum of a client is that of its samples, each a record of norm 1."""
    run = parse(sets.clients.settings(METHOD))
    samples = sets.clients.known(run, 0)
    stream = BlockStream(sets.clients.opened, CPU)
    attack = PrivateSumsAttack(sets, CPU).exact
    read = attack.known[0][: sets.samples].mean(dim=0)
    torch.testing.assert_close(attack.replies[0][0], read)
    assert len(list(_exact(stream, samples, run))) == 4


@pytest.mark.parametrize("name", TRAINED)
def test_attack_on_trained_tensors(sets: DataSets, name: str) -> None:
    """Members differ from other samples in their words only, so the figures are small but there."""
    attack = TrainedAttack(sets, TRAINED[name](sets.clients, CPU))
    found = attack.alone()
    assert (found.members, found.others) == (8, 24)
    assert found.auc > 0.5
    assert 0 <= attack.summed(2).auc <= 1


def test_means_of_trained_tensors(sets: DataSets) -> None:
    kind = InnerMatrices(sets.clients, CPU)
    replies = kind.of([0, 1])
    # Only the matrices between the frozen factors are sent.
    assert all(name.endswith("lora_r") for block in replies[0].values() for name in block)
    key = next(iter(replies[0]))
    for name, tensor in mean_of(replies)[key].items():
        torch.testing.assert_close(tensor, (replies[0][key][name] + replies[1][key][name]) / 2)


def test_layer_is_compared_with_its_aim(sets: DataSets) -> None:
    """Training on a sample decreases the error of the hidden states behind the layer."""
    kind = Layer(sets.clients, CPU, {"llm-streamline.learning-rate": 1e-2})
    samples = sets.clients.known(kind.run, 0)
    begun = {kind.KEY: first_layer(sets.clients.opened, kind.start)}
    (after,) = kind.of([0])
    assert kind.losses(samples, after).mean() < kind.losses(samples, begun).mean()


@pytest.mark.slow
def test_attack_on_private_adapters(sets: DataSets) -> None:
    """Adapters of DP-SGD come from the app; with other noise they are others."""
    pytest.importorskip("opacus", reason="needs the extra privacy")
    kinds = [Adapters(sets.clients, CPU, private_tuning(epsilon)) for epsilon in (1.0, 8.0)]
    attacks = [TrainedAttack(sets, kind) for kind in kinds]
    assert kinds[0].run.privacy.epsilon == 1
    key = next(iter(attacks[0].replies[0]))
    one, other = (attack.replies[0][key] for attack in attacks)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    found = attacks[0].alone()
    assert (found.members, found.others) == (8, 24)
    assert 0 <= found.auc <= 1


@pytest.mark.parametrize("changes", [{}, private_tuning(1.0)], ids=["plain", "private"])
def test_exposures_of_canaries(sets: DataSets, changes: dict[str, Any]) -> None:
    """Training on a canary lowers its loss more than that of other sentences."""
    if changes:
        pytest.importorskip("opacus", reason="needs the extra privacy")
    sentences = canaries(9, 0)
    for client in range(2):
        insert(sets.clients.folder, client, sentences[client], 4)
    settings = {**changes, "training.learning-rate": 3e-2, "data.sequence-length": 64}
    kind = Adapters(sets.clients, CPU, settings)
    alone, summed = exposures(kind, 2, sentences[:2], sentences[2:])
    assert len(alone) == len(summed) == 2
    assert all(0 <= one <= 3 for one in alone + summed)


def test_exposure_by_hand() -> None:
    """Of eight sentences three score at least as high as the canary: rank 4, one bit."""
    scores = column(5, 9, 5, 7, 1, 2, 3, 4)
    assert exposure(scores, 0, range(1, 8)) == 1.0
    assert exposure(scores, 1, [0, 2, 3, 4, 5, 6, 7]) == 3.0


def test_canaries_are_trained_on(tmp_path: Path) -> None:
    found = canaries(20, 0)
    assert len(set(found)) == 20
    assert not any(map(is_held_out, found))
    assert canaries(20, 0) == found != canaries(20, 1)
    (tmp_path / "3.jsonl").write_text('{"text": "other"}\n')
    insert(tmp_path, 3, found[0], 4)
    first, second = (tmp_path / "3.jsonl").read_text().splitlines()
    assert first.count(found[0]) == 4
    assert second == '{"text": "other"}'


def test_command_continues(
    sets: DataSets,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{WORDS[number % 13]} {number}" for number in range(400)))
    given = f"--model {sets.clients.model} --text {text} --kind".split()
    sizes = "--clients 2 --unused 2 --reference 2 --together 2 --samples 4 --tokens 16 --seeds 0"
    given += [POOLED, *sizes.split(), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["", *given])
    assert command.main() == 0
    page = (tmp_path / "out" / "leakage-model.md").read_text()
    assert page.count(f"| {POOLED} | each reply |") == 1
    assert page.count(f"| {POOLED} | sum of 2 replies |") == 1
    monkeypatch.setattr(command, "StatisticsAttack", lambda *_: pytest.fail("measured twice"))
    assert command.main() == 0
    monkeypatch.setattr(sys, "argv", ["", "--clients", "3"])
    assert command.main() == 2
    assert "--clients 3 is no multiple" in capsys.readouterr().err


def test_canaries_with_several_epsilons(
    sets: DataSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of copies is measured without noise and with every epsilon."""
    pytest.importorskip("opacus", reason="needs the extra privacy")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    found: list[float] = []

    def exposed(kind: Adapters, *_: object) -> tuple[list[float], list[float]]:
        found.append(kind.run.privacy.epsilon)
        return [2.0], [1.0]

    monkeypatch.setattr(command, "exposures", exposed)
    given = f"--model {sets.clients.model} --canaries --clients 2 --together 2 --samples 4"
    given += f" --tokens 16 --seeds 0 --out {tmp_path / 'out'}"
    monkeypatch.setattr(sys, "argv", ["", *given.split()])
    assert command.main() == 0
    assert found == [0.0, *command.EPSILONS] * len(command.CANARY_TIMES)
    page = (tmp_path / "out" / "leakage-model.md").read_text()
    assert "| 4 times in the text, epsilon 8 | sum of 2 replies | 1.0 |" in page
    assert "| 4 times in the text | each reply | 2.0 |" in page
