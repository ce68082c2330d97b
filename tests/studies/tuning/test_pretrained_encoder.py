"""Encoder of the studies of tuning: hidden tokens, unigrams, and a tiny one that is trained."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from benchmarks.tuning import pretrain_encoder
from benchmarks.tuning.pretrain_encoder import NOT_CHOSEN, Recipe
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import open_model
from tests.studies.tuning.test_tuning_studies import text

TINY = Recipe(
    vocabulary=300,
    hidden=16,
    layers=1,
    heads=2,
    tokens=12,
    longest=40,
    steps=40,
    batch=8,
    learning_rate=0.02,
)


def test_tokens_are_hidden_as_the_paper_says() -> None:
    rows = torch.randint(5, 300, (200, 50), generator=torch.Generator().manual_seed(0))
    rows[:, 0], rows[:, -1] = 0, 2
    given, wanted = pretrain_encoder.hidden_from(rows, 300, torch.Generator().manual_seed(1))
    asked = wanted != NOT_CHOSEN
    assert torch.equal(wanted[asked], rows[asked])
    assert torch.equal(given[~asked], rows[~asked])
    assert not asked[:, [0, -1]].any()
    assert float(asked[:, 1:-1].float().mean()) == pytest.approx(0.15, abs=0.02)
    assert float((given[asked] == 4).float().mean()) == pytest.approx(0.8, abs=0.05)
    assert float((given[asked] == wanted[asked]).float().mean()) == pytest.approx(0.1, abs=0.04)
    assert int(given[asked & (given != 4)].min()) >= 5


def test_unigrams_by_hand() -> None:
    """Token 5 occurs three times and token 6 once.

    With one added to each of the four tokens 5 to 8, their fractions are 4/8 and 2/8.
    """
    recipe = Recipe(vocabulary=9)
    rows = torch.tensor([[0, 5, 5, 2], [0, 5, 6, 2]])
    held = torch.full((400, 12), 6)
    held[:, 1::2] = 5
    _, wanted = pretrain_encoder.hidden_from(
        held, 9, pretrain_encoder._generator(recipe, "held out")
    )
    fives = int((wanted == 5).sum())
    sixes = int((wanted == 6).sum())
    expected = -(fives * math.log(4 / 8) + sixes * math.log(2 / 8)) / (fives + sixes)
    assert pretrain_encoder.unigram_loss(rows, held, recipe) == pytest.approx(expected)


def test_an_encoder_learns_and_opens_as_one(tmp_path: Path) -> None:
    report = pretrain_encoder.make_encoder([text()], TINY, tmp_path / "encoder")
    untrained = pretrain_encoder.make_encoder(
        [text()], replace(TINY, steps=0), tmp_path / "untrained"
    )
    assert report["held_out_loss"] < untrained["held_out_loss"] - 1
    assert report["unigram_loss"] == untrained["unigram_loss"]
    model = open_model(str(tmp_path / "encoder"))
    assert (model.family.name, len(model.plan.blocks)) == ("roberta", 1)
    tokens = model.tokenizer("Oak Fir")["input_ids"]
    assert (tokens[0], tokens[-1]) == (0, 2)
    assert tokens == model.tokenizer("oak fir")["input_ids"]
    assert json.loads((tmp_path / "encoder.json").read_text()) == report


def test_the_same_seed_gives_the_same_encoder(tmp_path: Path) -> None:
    recipe = replace(TINY, steps=2)
    weights = []
    for name in ("one", "two"):
        pretrain_encoder.make_encoder([text()], recipe, tmp_path / name)
        weights.append(load((tmp_path / name / "model.safetensors").read_bytes()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_too_large_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        EspalierError, match=r"gives a vocabulary of \d+ tokens, --vocabulary is 5000; lower it"
    ):
        pretrain_encoder.make_encoder([text()], Recipe(vocabulary=5000), tmp_path / "encoder")
