"""Study of FedSpine on a task: rows equal the runs' results."""

import argparse
import csv
import json
from pathlib import Path
from statistics import fmean

import pytest
import torch

from benchmarks.fedspine.tasks import cuts, runs
from benchmarks.fedspine.tasks import study as task_study
from benchmarks.fedspine.tasks.compared_methods import CHOICES
from benchmarks.reports import write_again
from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.model import load_whole
from espalier.training.loop import Loop
from strategies.fleet import fleet_of
from tests.bench import private_text
from tests.tiny_model import save_tiny_llama, save_tiny_roberta

ITEMS = 12


def records(path: Path, number: int) -> Path:
    """Write sentences that are good or bad."""
    lines = [
        {"sentence": f"a {'good' if n % 2 else 'bad'} film, number {n}", "label": n % 2}
        for n in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def given(folder: Path, *words: str) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser()
    task_study.add_arguments(parser)
    model = (
        folder / "encoder"
        if (folder / "encoder").exists()
        else save_tiny_roberta(folder / "encoder")
    )
    short = "--rounds 2 --steps 2 --every 1 --shares 0.3 --task sst2 --max-tokens 24"
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


@pytest.mark.slow
def test_a_row_is_what_its_run_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CHOICES", {"bandits": {}, "schedule": CHOICES["schedule"]})
    monkeypatch.setattr(runs, "DEVICES", 3)
    monkeypatch.setattr(runs, "GRID", ((0.3, 8), (0.3, 32)))
    records(tmp_path / "test.jsonl", ITEMS)
    train = records(tmp_path / "train.jsonl", 120)
    monkeypatch.setattr(runs, "UNPRUNED", {"FedPETuning": {"method": "fedpetuning"}})
    task_study.work(given(tmp_path, "--train", str(train), "--parts", "methods", "grid"))
    rows = (tmp_path / "fedspine-sst2.csv").read_text().splitlines()
    names = rows[0].split(",")
    found = {row.split('"')[1] if '"' in row else row.split(",")[3]: row for row in rows[1:]}
    by_samples = {f"{name}, weights by samples" for name in ("bandits", runs.UNPRUNED_BANDIT)}
    assert found.keys() == {
        "FedPETuning",
        "bandits",
        "schedule",
        "schedule, rank 8",
        "schedule, rank 32",
        *by_samples,
    }
    (run,) = (tmp_path / "runs" / "0-high-0.3-bandits" / "runs").iterdir()
    last = json.loads((run / "rounds.json").read_text())["rounds"][-1]
    own = dict(zip(names, found["bandits"].split(","), strict=True))
    assert float(own["score"]) == pytest.approx(fmean(last["scores"]["acc"].values()), rel=1e-5)
    assert float(own["worst"]) == pytest.approx(min(last["scores"]["acc"].values()), rel=1e-5)
    assert float(own["seconds"]) == pytest.approx(
        json.loads((run / "summary.json").read_text())["virtual_seconds"], rel=1e-5
    )
    (shared,) = (tmp_path / "runs" / "0-high-0-FedPETuning" / "runs").iterdir()
    own = dict(zip(names, found["FedPETuning"].split(","), strict=True))
    document = json.loads((shared / "summary.json").read_text())
    assert float(own["seconds"]) == pytest.approx(document["virtual_seconds"], rel=1e-5)
    assert float(own["waiting"]) == pytest.approx(document["report"]["waiting_seconds"], rel=1e-5)
    report = (tmp_path / "fedspine-sst2.md").read_text()
    assert "| schedule | " in report
    assert "| 30% (" in report
    assert (tmp_path / "fedspine-sst2.png").exists()
    assert write_again(tmp_path / "fedspine-sst2")
    assert (tmp_path / "fedspine-sst2.md").read_text() == report
    task_study.work(given(tmp_path, "--train", str(train), "--parts", "methods", "grid"))
    assert len((tmp_path / "fedspine-sst2.csv").read_text().splitlines()) == len(rows)


def test_full_weights_or_head_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated training sets every parameter to the client's number of sequences.

    Bytes and operations are computed by hand.
    """
    monkeypatch.setattr(runs, "DEVICES", 3)
    records(tmp_path / "test.jsonl", ITEMS)
    train = records(tmp_path / "train.jsonl", 120)
    seen = list[tuple[int, set[float]]]()

    def run(self: Loop, first_step: int, steps: int, moments: object = None) -> None:
        seen.append(
            (
                self.num_sequences,
                {round(value.mean().item(), 3) for value in self.parameters.values()},
            )
        )
        for value in self.parameters.values():
            value.data.fill_(self.num_sequences)

    monkeypatch.setattr(Loop, "run", run)
    task_study.work(given(tmp_path, "--train", str(train), "--parts", "whole"))
    sizes = [size for size, _ in seen[:3]]
    mean = round(sum(size * size for size in sizes) / sum(sizes), 3)
    assert [began for _, began in seen[3:6]] == [{mean}] * 3, (
        "the second round begins with the mean"
    )
    computing = Computing(torch.device("cpu"), torch.float32, 1)
    whole = load_whole(OpenedModel(tmp_path / "encoder"), computing, "float32", num_labels=2)
    every = {name: value.numel() for name, value in whole.named_parameters()}
    head = sum(size for name, size in every.items() if name.startswith("classifier"))
    rows = list(csv.DictReader((tmp_path / "fedspine-sst2.csv").open()))
    numbers = {"all weights, rate 0.0001": sum(every.values()), "the head alone": head}
    for row in (row for row in rows if row["model"].removeprefix("tuned: ") in numbers):
        number = numbers[row["model"].removeprefix("tuned: ")]
        assert float(row["megabytes_up"]) == pytest.approx(2 * 4 * number / 1e6, rel=1e-4)
        assert float(row["megabytes_down"]) == pytest.approx(4 * number / 1e6, rel=1e-4)
        rounds = []
        fleet = fleet_of("high")
        assert fleet is not None
        for number_of_round in (1, 2):
            drawn = [fleet.drawn(0, client, number_of_round) for client in range(3)]
            # Below the head there is only a forward pass.
            operations = 2 * 8 * 24 * (6 * number + 2 * (sum(every.values()) - number))
            rounds.append(
                max(
                    operations / one.operations_per_second
                    + 8 * 4 * number * number_of_round / one.bits_per_second
                    for one in drawn
                )
            )
        assert float(row["seconds"]) == pytest.approx(sum(rounds), rel=1e-4)
    assert "| tuned: the head alone | " in (tmp_path / "fedspine-sst2.md").read_text()


@pytest.mark.slow
def test_llm_pruner_cuts_before_or_after_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both cuts are runs of their own, stored like others.

    A model that is cut last is scored after the rounds.
    """
    spared = {"llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0, "data.num-samples": 2}
    monkeypatch.setattr(cuts, "CUT_FIRST", cuts.CUT_FIRST | spared)
    monkeypatch.setattr(
        cuts, "LAST", {name: (run, how | spared) for name, (run, how) in cuts.LAST.items()}
    )
    monkeypatch.setattr(cuts, "SEQUENCE_LENGTH", 16)
    monkeypatch.setattr(runs, "DEVICES", 2)
    records(tmp_path / "test.jsonl", ITEMS)
    train = records(tmp_path / "train.jsonl", 60)
    model = save_tiny_llama(tmp_path / "llama", positions=256)
    words = ["--train", str(train), "--parts", "cuts", "--model", str(model)]
    public = tmp_path / "public.txt"
    public.write_text("\n\n".join(private_text(client) for client in range(3)))
    with pytest.raises(EspalierError, match="--parts cuts needs --calibration FILE"):
        task_study.work(given(tmp_path, *words))
    task_study.work(given(tmp_path, *words, "--calibration", str(public)))
    text = (tmp_path / "fedspine-sst2.csv").read_text()
    assert all(name in text for name in (cuts.FIRST, *cuts.LAST))
    for run in ("0-0.3-LLM-Pruner", "0-0.3-Mask Tuning", "0-0.3-all of Mask Tuning"):
        (made,) = (tmp_path / "runs" / run / "runs").iterdir()
        assert (
            OpenedModel(made / "model").plan.num_parameters < OpenedModel(model).plan.num_parameters
        )


@pytest.mark.slow
def test_other_fleet_s_figures_equal_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that does not depend on times is made once for all fleets.

    Its figures for another fleet equal those of a run with that fleet's clock.
    """
    monkeypatch.setattr(runs, "DEVICES", 3)
    records(tmp_path / "test.jsonl", ITEMS)
    words = [
        "--train",
        str(records(tmp_path / "train.jsonl", 120)),
        "--parts",
        "fleets",
        "--only",
        "schedule",
        "FedPETuning",
    ]
    task_study.work(given(tmp_path, *words))
    assert {run.name for run in (tmp_path / "runs").iterdir()} == {
        "0-high-0-FedPETuning",
        "0-high-0.3-schedule",
    }
    monkeypatch.setattr(runs, "depends_on_times", lambda settings: True)
    task_study.work(
        given(
            tmp_path,
            *words,
            "--work",
            str(tmp_path / "runs-of-all"),
            "--out",
            str(tmp_path / "all"),
        )
    )
    assert len(list((tmp_path / "runs-of-all").iterdir())) == 4
    for name in ("fedspine-sst2.csv", "fedspine-sst2-curves.csv"):
        found, wanted = (
            list(csv.DictReader((folder / name).open())) for folder in (tmp_path, tmp_path / "all")
        )
        assert len(found) > 3
        assert {tuple(row.values()) for row in found} == {tuple(row.values()) for row in wanted}


def test_records_that_are_not_there_are_named(tmp_path: Path) -> None:
    records(tmp_path / "test.jsonl", ITEMS)
    with pytest.raises(EspalierError, match="needs --train FILE, or --clients DIRECTORY"):
        task_study.work(given(tmp_path))
    with pytest.raises(EspalierError, match=r"client_9.jsonl: is no file; name the records"):
        task_study.work(given(tmp_path, "--clients", str(tmp_path)))
