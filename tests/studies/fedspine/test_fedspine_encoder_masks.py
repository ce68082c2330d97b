"""Mask Tuning of an encoder in FedSpine's study: mask gradients, cuts and scales.

They are compared with slow references.
"""

import argparse
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from benchmarks.fedspine.tasks import cuts, encoder_masks, runs
from benchmarks.fedspine.tasks import study as task_study
from benchmarks.fedspine.tasks.encoder_masks import Place, mask_gradients, mask_tuned, masked
from espalier.data.tasks.item import Batch
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.structure import READERS
from tests.tiny_model import save_tiny_roberta

HOW = cuts.LAST["FedPETuning, then all of Mask Tuning"][1]


def records(path: Path, number: int) -> Path:
    """Write sentences that are good or bad."""
    lines = [
        {"sentence": f"a {'good' if n % 2 else 'bad'} film, number {n}", "label": n % 2}
        for n in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenedModel, Any]:
    """Tiny encoder whose weights are large enough to make its prunable groups differ."""
    folder = save_tiny_roberta(tmp_path_factory.mktemp("encoder"))
    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, dtype=torch.float64
    ).eval()
    for value in whole.requires_grad_(False).parameters():
        value.add_(torch.randn_like(value) * 0.1)
    return OpenedModel(folder), whole


def batch() -> Batch:
    """Return two items, one of them padded."""
    tokens = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 1, 1]])
    return Batch(tokens, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]), torch.tensor([0, 1]))


def losses(whole: Any, given: Batch) -> Tensor:
    """Return the loss of each item."""
    logits = whole(input_ids=given.input_ids, attention_mask=given.attention_mask).logits
    return nn.functional.cross_entropy(logits, given.labels, reduction="none")


def test_mask_gradients_equal_finite_differences(encoder: tuple[OpenedModel, Any]) -> None:
    model, whole = encoder
    found = mask_gradients(model, whole, [batch()])
    step = 1e-5
    ones = {
        place: torch.ones(gradient.shape[1], dtype=torch.float64)
        for place, gradient in found.items()
    }
    for place, gradient in found.items():
        for unit in range(0, gradient.shape[1], 5):
            sides = []
            for sign in (1, -1):
                moved = ones[place].clone()
                moved[unit] += sign * step
                with masked(model, whole, {**ones, place: moved}):
                    sides.append(losses(whole, batch()))
            assert gradient[:, unit].tolist() == pytest.approx(
                ((sides[0] - sides[1]) / (2 * step)).tolist(), abs=1e-5
            )


def test_zero_mask_equals_zero_columns(encoder: tuple[OpenedModel, Any]) -> None:
    model, whole = encoder
    masks = {
        place: torch.ones(own.shape[1])
        for place, own in mask_gradients(model, whole, [batch()]).items()
    }
    masks[0, "groups"][1] = 0
    masks[1, "channels"][3] = 0.5
    with masked(model, whole, masks):
        expected = losses(whole, batch())
    before = {}
    for (index, kind), unit, factor in (((0, "groups"), 1, 0.0), ((1, "channels"), 3, 0.5)):
        module = whole.get_submodule(model.family.module_path(index, READERS[kind]))
        size = module.in_features // len(masks[index, kind])
        before[module] = module.weight.clone()
        module.weight[:, unit * size : (unit + 1) * size] *= factor
    found = losses(whole, batch())
    for module, weight in before.items():
        module.weight.copy_(weight)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def given(folder: Path, *words: str) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser()
    task_study.add_arguments(parser)
    short = "--rounds 2 --steps 2 --every 1 --shares 0.5 --task sst2 --max-tokens 24 --parts cuts"
    model = save_tiny_roberta(folder / "encoder")
    places = [
        "--model",
        str(model),
        "--test",
        str(folder / "test.jsonl"),
        "--work",
        str(folder / "runs"),
        "--out",
        str(folder),
    ]
    return parser.parse_args([*short.split(), *places, *words])


def test_encoder_is_cut_after_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variants start from one run and cut half of the parameters.

    All of Mask Tuning also scales the remaining groups.
    """
    spared = {"llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0}
    monkeypatch.setattr(
        cuts, "LAST", {name: (run, how | spared) for name, (run, how) in cuts.LAST.items()}
    )
    monkeypatch.setattr(runs, "DEVICES", 2)
    found = list[Mapping[Place, Tensor]]()

    def noted(*arguments: Any) -> encoder_masks.MaskTuned:
        found.append((made := mask_tuned(*arguments)).masks)
        assert made.pruned >= 0.5
        return made

    monkeypatch.setattr(runs, "mask_tuned", noted)
    records(tmp_path / "test.jsonl", 12)
    task_study.work(given(tmp_path, "--train", str(records(tmp_path / "train.jsonl", 60))))
    rows = list(csv.DictReader((tmp_path / "fedspine-sst2.csv").open()))
    assert [row["model"] for row in rows] == list(cuts.LAST)
    assert all(0.5 <= float(row["pruned"]) < 0.6 for row in rows)
    assert len(list((tmp_path / "runs").glob("*/runs/*"))) == 1
    searched, refined = found
    for place, mask in searched.items():
        assert set(mask.tolist()) <= {0.0, 1.0}
        assert (refined[place] == 0).sum() == (mask == 0).sum(), "as many go, though others"
    assert any(bool(((mask > 0) & (mask != 1)).any()) for mask in refined.values())
