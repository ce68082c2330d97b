"""Study of bad clients: attacks on small tensors, cells, and a study that continues."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.robust import __main__ as command
from benchmarks.robust import study
from benchmarks.robust.attacks import ADAPTERS, ALL_ONES, INVERTED, RANDOM, SUMS, BadClient
from espalier.hf.opening.opened_model import OpenedModel
from espalier.methods.pruning.pooled_pruning import FRACTION_BITS
from espalier.settings.run import parse
from pruning_kernels.fixed_point import from_words, to_words
from pruning_kernels.votes.bitmask import pack, unpack
from tests.bench import home, private_text


def test_attacks_on_changes_by_hand() -> None:
    change = torch.tensor([1.0, -4.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    assert ADAPTERS["sign flipped"](change, generator).tolist() == [-1, 4, 0]
    assert ADAPTERS["flipped, 8 times"](change, generator).tolist() == [-8, 32, 0]
    against = ADAPTERS["every number against"](change, generator).tolist()
    assert against == pytest.approx([-3.6, 3.6, 0])
    noise = ADAPTERS["random"](torch.full((10000,), 2.0), generator)
    assert float(noise.square().mean().sqrt()) == pytest.approx(6, rel=0.05)


def test_attacks_on_sums_stay_positive() -> None:
    sums = torch.tensor([1.0, 2.0, 8.0]).double()
    generator = torch.Generator().manual_seed(0)
    assert SUMS["1000 times"](sums, generator).tolist() == [1000, 2000, 8000]
    inverted = SUMS["inverted"](sums, generator)
    assert inverted.tolist() == pytest.approx([4e6, 2e6, 5e5])
    assert bool((SUMS["random"](sums, generator) > 0).all())


@pytest.mark.parametrize("sparsity", [0.3, 0.6])
def test_votes_keep_their_number(tmp_path: Path, sparsity: float) -> None:
    model = OpenedModel(home(tmp_path).model)
    shape = model.plan.blocks[0].linear("attn.q").shape
    mask = np.random.default_rng(0).random(shape) < sparsity
    words = torch.from_numpy(pack(mask))
    run = parse({"method": "fedprllm"})
    found = {
        attack: unpack(
            BadClient(attack, run, model, 1)
            ._tensor("block-0000", "attn.q.prune_mask", words)
            .numpy(),
            shape,
        )
        for attack in (ALL_ONES, INVERTED, RANDOM)
    }
    assert found[ALL_ONES].all()
    number = mask.sum(axis=1)
    assert (found[INVERTED].sum(axis=1) == number).all()
    both = (found[INVERTED] & mask).sum(axis=1)
    assert (both == np.maximum(2 * number - shape[1], 0)).all()
    assert (found[RANDOM].sum(axis=1) == mask.sum(axis=1)).all()
    assert (found[RANDOM] != mask).any()


def test_attacks_on_scores_and_moments(tmp_path: Path) -> None:
    """Scores are multiplied; of moments only sums of squares grow, so that they stay possible."""
    model = OpenedModel(home(tmp_path).model)
    pruner = BadClient("1000 times", parse({"method": "llm-pruner"}), model, 1)
    scores = pruner._tensor("block-0001", "groups.score", torch.tensor([1.0, 2.0]))
    assert scores.dtype == torch.float32
    assert scores.tolist() == [1000, 2000]
    flap = BadClient("inverted", parse({"method": "flap"}), model, 1)
    bits = FRACTION_BITS["tokens"]
    squares = torch.tensor([1.0, 2.0, 1e5]).double()
    words = torch.from_numpy(to_words(squares, bits))
    assert flap._tensor("block-0000", "mlp.down.sums", words) is words
    found = from_words(flap._tensor("block-0000", "mlp.down.squares", words).numpy(), bits)
    assert found.tolist() == pytest.approx([4e6, 2e6, 1e5])


def test_cells_have_every_attack_and_rule() -> None:
    found = list(study.cells([0], ["fedprllm"], [0, 2]))
    assert [cell.attack for cell in found if cell.bad == 0] == [study.NOBODY] * 3
    assert {(cell.attack, cell.rule) for cell in found if cell.bad == 2} == {
        (attack, rule)
        for attack in (ALL_ONES, INVERTED, RANDOM)
        for rule in ("mean", "trimmed mean, 2", "median")
    }
    assert len({cell.folder() for cell in found}) == len(found)


def test_study_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    shared = home(tmp_path / "home")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(private_text(client) for client in range(8)))
    fedprllm = study.SUBJECTS["fedprllm"]
    few = study.Subject((ALL_ONES, INVERTED), ("median",), fedprllm.settings)
    monkeypatch.setitem(study.SUBJECTS, "fedprllm", few)
    given = f"--model {shared.model} --path {text} --text public={shared.public} --bad 0 3"
    given += " --method fedprllm --samples 2 --sequence-length 16 --max-samples 2 --seeds 0"
    given += f" --work {tmp_path / 'work'} --out {tmp_path / 'out'}"
    monkeypatch.setattr(sys, "argv", ["", *given.split()])
    assert command.main() == 0
    (path,) = (tmp_path / "out").glob("robust-*.md")
    page = path.read_text()
    (ones,) = [line for line in page.splitlines() if f"| {ALL_ONES} |" in line]
    # A mask of ones breaks the contract.
    assert ones.count("(3)") == 1
    assert page.count("| 3 of 8 |") == 2
    assert page.count("| 0 of 8 | nobody |") == 1
    assert list((tmp_path / "work").iterdir()) == []
    monkeypatch.setattr(
        "benchmarks.smaller.bench.run_method", lambda *_: pytest.fail("a cell was measured twice")
    )
    assert command.main() == 0
    monkeypatch.setattr(sys, "argv", ["", "--path", str(text)])
    assert command.main() == 2
    assert "--path and --text belong together" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "rule"), [("flap", "median"), ("llm-pruner", "clipped mean")])
def test_methods_with_scores(
    method: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad clients keep to the contract, so that none is dropped."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    shared = home(tmp_path / "home")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(private_text(client) for client in range(8)))
    whole = study.SUBJECTS[method]
    assert rule in whole.rules
    spared = {"llm-pruner.spare-last": 0} if method == "llm-pruner" else {}
    few = study.Subject(("inverted",), (rule,), whole.settings | spared)
    monkeypatch.setitem(study.SUBJECTS, method, few)
    given = f"--model {shared.model} --path {text} --text public={shared.public} --bad 1"
    given += f" --method {method} --samples 2 --sequence-length 16 --max-samples 2 --seeds 0"
    given += f" --work {tmp_path / 'work'} --out {tmp_path / 'out'}"
    monkeypatch.setattr(sys, "argv", ["", *given.split()])
    assert command.main() == 0
    (path,) = (tmp_path / "out").glob("robust-*.csv")
    (_, row) = path.read_text().splitlines()
    assert row.endswith(",0")
