"""FedSODA's studies: varied settings, disjoint records and public text, reported figures."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fedsoda import cells, memory
from benchmarks.fedsoda.__main__ import COMMANDS, MEASURED, main
from benchmarks.fedsoda.cells import FEDBIOT, FEDOT, FEDPETUNING, FEDSODA, IID, METHODS, SODA, Cell
from benchmarks.fedsoda.measured_study import chosen
from benchmarks.fedsoda.report import rounds_needed, write_report
from benchmarks.fedsoda.runs import full_number
from benchmarks.fedsoda.sources import is_public, make_sources
from benchmarks.fedsoda.studies import CHANCE, COSTS, DENSE, PERPLEXITIES, SCORES, STUDIES
from benchmarks.reporting.rows import Rows
from espalier.data.tasks.catalogue import task_named
from espalier.data.tasks.task_source import items_in
from espalier.errors import EspalierError
from espalier.methods.tuning.fedsoda import FedSodaSettings
from espalier.settings.run import RunSettings, parse
from tests.tiny_model import WORDS, save_tiny_llama

CONDITIONS: dict[str, Any] = {
    "model": {"name": "tiny", "parameters": 7},
    "settings": {"federation.rounds": 2},
}
NAMED = {
    "data.source": "files",
    "data.path": "train.jsonl",
    "task.name": "arc-easy",
    "evaluation.texts": "tested=tested.txt",
}
ALL = [(name, cell) for name, study in STUDIES.items() for cell in study.cells()]
BLOCKS = 8


def parsed(cell: Cell, **changes: Any) -> RunSettings:
    """Return the settings of a cell's run, all of which the run uses."""
    flat = {**cell.settings(changes), **NAMED}
    return parse(flat, simulation=True, by_hand=set(flat))


def the(study: str, arm: str) -> FedSodaSettings:
    """Return a cell's FedSODA settings for the even partition."""
    (cell,) = [cell for cell in STUDIES[study].cells() if (cell.arm, cell.place) == (arm, IID)]
    return parsed(cell).of(FedSodaSettings)


# ----- cells --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("study", "cell"), ALL, ids=[f"{name}-{cell.arm}-{cell.place}" for name, cell in ALL]
)
def test_every_cell_is_a_valid_run(study: str, cell: Cell) -> None:
    settings = parsed(cell)
    assert (settings.num_clients, settings.federation.rounds) == (10, 10)
    assert (settings.lora.rank, settings.lora.alpha) == (8, 16)
    assert settings.lora.targets == "attn.q,attn.k,attn.v,mlp.up,mlp.down"
    assert not settings.evaluation.local_baseline
    if settings.method == "fedsoda":
        job = settings.of(FedSodaSettings)
        assert job.num_dropped == 2
        assert job.first_layers + job.adapter_layers == 3
        assert len(job.emulator_of(BLOCKS)) == 5


def test_methods_differ_as_the_paper_says() -> None:
    runs = {cell.arm: parsed(cell) for cell in cells.rounds()}
    assert list(runs) == ["FedPETuning", "FedOT", "FedBiOT", "FedSODA"]
    assert runs[FEDPETUNING].lora.layers == "all"
    jobs = {name: runs[name].of(FedSodaSettings) for name in (FEDOT, FEDBIOT, FEDSODA)}
    assert {name: job.drop for name, job in jobs.items()} == {
        FEDOT: "uniform",
        FEDBIOT: "uniform",
        FEDSODA: "similar",
    }
    assert {name: job.realign_every for name, job in jobs.items()} == {
        FEDOT: 0,
        FEDBIOT: 1,
        FEDSODA: 5,
    }
    assert {name: job.emulator for name, job in jobs.items()} == {
        FEDOT: "stored",
        FEDBIOT: "stored",
        FEDSODA: "nf4",
    }
    assert [name for name in jobs if jobs[name].pulls_to_first(runs[name].training)] == [FEDBIOT]
    assert {
        name: run.training.base for name, run in runs.items() if run.training.base != "float32"
    } == {FEDSODA: "nf4"}
    assert len({run.training.learning_rate for run in runs.values()}) == 1


def test_labels_are_spread_in_four_ways() -> None:
    spread = {cell.place: parsed(cell).data for cell in cells.methods() if cell.arm == FEDOT}
    assert {
        place: (data.partition, data.alpha) for place, data in spread.items() if place != IID
    } == {
        "alpha 5": ("dirichlet", 5.0),
        "alpha 0.5": ("dirichlet", 0.5),
        "alpha 0.1": ("dirichlet", 0.1),
    }
    assert spread[IID].partition == "iid"


def test_the_ablation_leaves_out_alignments() -> None:
    found = {
        arm: (the("ablation", arm).pre_align_steps > 0, the("ablation", arm).realign_every)
        for arm in ("none", "pre", "realign", "both")
    }
    assert found == {"none": (False, 0), "pre": (True, 0), "realign": (False, 5), "both": (True, 5)}


def test_local_steps_keep_product_and_intervals() -> None:
    shapes = [
        (job.group_layers, job.groups)
        for job in (the("combinations", f"(n, p) = ({n}, {2 // n})") for n in (1, 2))
    ]
    assert shapes == [(1, 2), (2, 1)]
    again = {
        r: [
            number for number in range(1, 11) if the("combinations", f"r = {r}").realigns_in(number)
        ]
        for r in (2, 5, 10)
    }
    assert again == {2: [2, 4, 6, 8, 10], 5: [5, 10], 10: [10]}


def test_cell_of_several_studies_is_the_same_run() -> None:
    runs = [
        cell.settings({})
        for _, cell in ALL
        if cell.arm in (FEDSODA, "both", "(n, p) = (1, 2)", "r = 5", "out-of-domain")
        and cell.place == IID
    ]
    assert len(runs) == 6
    assert all(run == runs[0] for run in runs)


def test_command_line_settings_go_where_read() -> None:
    common = chosen(["training.steps=5", "fedsoda.pre-align-steps=7", "lora.targets=attn.q"])
    assert common == {"training.steps": 5, "fedsoda.pre-align-steps": 7, "lora.targets": "attn.q"}
    tuned = Cell("any", IID, METHODS[FEDPETUNING]).settings(common)
    assert tuned["training.steps"] == 5
    assert not any(key.startswith("fedsoda") for key in tuned)
    assert Cell("any", IID, SODA).settings(common)["fedsoda.pre-align-steps"] == 7
    with pytest.raises(EspalierError, match=r"--set steps: is no KEY=VALUE"):
        chosen(["steps"])


# ----- data ---------------------------------------------------------------------------------------


def question(number: int) -> dict[str, Any]:
    """Return a question of ARC whose answer is its second choice."""
    choices = [
        {"text": f"{WORDS[(number + step) % len(WORDS)]} {step}", "label": "ABCD"[step]}
        for step in range(4)
    ]
    return {
        "question": {"stem": f"{WORDS[number % len(WORDS)]} {number}?", "choices": choices},
        "answerKey": "B",
    }


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Test items, training records and a text of another domain.

    There are twenty test items, and the first ten training records are test items.
    """
    found = {name: tmp_path / name for name in ("train.jsonl", "test.jsonl", "public.txt")}
    found["train.jsonl"].write_text("".join(json.dumps(question(n)) + "\n" for n in range(10, 300)))
    found["test.jsonl"].write_text("".join(json.dumps(question(n)) + "\n" for n in range(20)))
    found["public.txt"].write_text(
        "".join(f"{' '.join(WORDS[n % len(WORDS) :][:9])} {n}\n\n" for n in range(400))
    )
    return found


def test_client_public_and_test_data_are_disjoint(files: dict[str, Path], tmp_path: Path) -> None:
    settings = parse({"method": "fedpetuning", **NAMED, "task.test-path": str(files["test.jsonl"])})
    made = make_sources(
        settings, files["train.jsonl"], files["public.txt"], tmp_path / "data", 1000, 2000
    )
    private = [
        json.loads(line)["question"]["stem"] for line in made.clients.read_text().splitlines()
    ]
    text = [
        part.splitlines()[0].removeprefix("Question: ")
        for part in made.in_domain.read_text().split("\n\n")
        if part
    ]
    tested = {question(n)["question"]["stem"] for n in range(20)}
    everything = {question(n)["question"]["stem"] for n in range(20, 300)}
    assert set(private) | set(text) <= everything
    assert not set(private) & set(text)
    assert not tested & {*private, *text}
    assert len(private) > 100
    assert all(
        is_public(item) is False
        for item in items_in(task_named("arc-easy"), str(made.clients)).items()
    )
    assert len(made.in_domain.read_text()) <= 2000
    assert made.in_domain.read_text().startswith(f"Question: {text[0]}\nAnswer: ")
    assert files["public.txt"].read_text().startswith(made.out_of_domain.read_text())
    assert made.tested.read_text().count("\n\n") == 20
    few = make_sources(
        settings, files["train.jsonl"], files["public.txt"], tmp_path / "few", 7, 2000
    )
    assert few.clients.read_text().splitlines() == made.clients.read_text().splitlines()[:7]


def test_public_text_with_test_items_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    settings = parse({"method": "fedpetuning", **NAMED, "task.test-path": str(files["test.jsonl"])})
    text = "".join(f"Question: {question(n)['question']['stem']}  Answer:\n" for n in range(3))
    files["public.txt"].write_text(text)
    with pytest.raises(
        EspalierError, match=r"public.txt: has 3 lines that are questions of test items"
    ):
        make_sources(
            settings, files["train.jsonl"], files["public.txt"], tmp_path / "data", 1000, 2000
        )


# ----- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dropped", "numbers"),
    [([], [0, 1, 2]), ([1, 3], [0, 2, 4, 5, 6, 7]), ([3, 4], [0, 1, 2, 5, 6, 7]), ([0], [1, 2, 3])],
)
def test_sub_model_blocks_have_full_numbers(dropped: list[int], numbers: list[int]) -> None:
    assert [full_number(index, dropped) for index in range(len(numbers))] == numbers


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> list[str]:
    """Arguments for runs of two rounds with two clients."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    model = save_tiny_llama(
        files["train.jsonl"].parent / "base", blocks=BLOCKS, hidden=64, feed_forward=64, std=0.1
    )
    settings = {
        "num-clients": 2, "federation.rounds": 2, "federation.sampled-clients": 1.0,
        "training.steps": 1, "training.batch-size": 1, "task.max-tokens": 16,
        "task.max-test-tokens": 16, "task.max-test-items": 4, "lora.rank": 2,
        "evaluation.sequence-length": 16, "evaluation.max-samples": 2, "public.samples": 4,
        "fedsoda.pre-align-steps": 1, "fedsoda.realign-steps": 1,
    }  # fmt: skip
    named = {
        "model": model, "data": files["train.jsonl"], "test": files["test.jsonl"],
        "public": files["public.txt"], "work": model.parent / "work", "out": model.parent / "out",
        "characters": 3000,
    }  # fmt: skip
    given = [text for name, value in named.items() for text in (f"--{name}", str(value))]
    return [
        "--seeds",
        "0",
        *given,
        *(text for key, value in settings.items() for text in ("--set", f"{key}={value}")),
    ]


def test_a_study_runs_the_app_once_for_each_cell(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "METHODS", {name: METHODS[name] for name in (FEDOT, FEDSODA)})
    assert main(["rounds", *small]) == 0
    lines = (tmp_path / "out" / "fedsoda-rounds.csv").read_text().splitlines()
    assert [line.rpartition(",")[0] for line in lines[1:]] == [
        f"0,{arm},{n}" for arm in (FEDOT, FEDSODA) for n in range(3)
    ]
    results = sorted((tmp_path / "work" / "results").glob("*.json"))
    assert len(results) == 2
    for result in map(json.loads, (path.read_text() for path in results)):
        # The sub-model is sent once and counted separately.
        assert 0 < result["bytes_down"] < result["bytes_stored"]
        # Rank 2 on q, k, v, up and down of three blocks.
        assert result["trained"] == 3 * 2 * ((64 + 64) + 2 * (32 + 64) + 2 * (64 + 64))
        assert len(result["dropped"]) == 2
    monkeypatch.setattr(
        "benchmarks.fedsoda.runs.run_method", lambda *_: pytest.fail("a run was made twice")
    )
    monkeypatch.setattr(cells, "DISTRIBUTIONS", {IID: {}})
    assert main(["methods", *small]) == 0
    rows = (tmp_path / "out" / "fedsoda-methods.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in rows[1:]] == [
        ["0", arm, IID] for arm in (CHANCE, DENSE, FEDOT, FEDSODA)
    ]
    losses = {line.split(",")[1]: float(line.split(",")[3]) for line in rows[1:]}
    # The loss counts only the correct options, or all of them.
    assert losses[FEDSODA] == pytest.approx(float(lines[-1].rpartition(",")[2]), rel=1e-5)
    assert losses[DENSE] == pytest.approx(float(lines[1].rpartition(",")[2]), rel=1e-5)
    assert "| FedSODA |" in (tmp_path / "out" / "fedsoda-methods.md").read_text()


def test_memory_is_measured_in_own_processes(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def in_a_fresh_process(settings: dict[str, Any]) -> dict[str, float]:
        asked.append(settings["method"])
        return {
            "interpreter_mib": 300.0,
            "peak_mib": 350.0 + len(asked),
            "client_mib": 50.0 + len(asked),
        }

    monkeypatch.setattr(memory, "in_a_fresh_process", in_a_fresh_process)
    assert main(["memory", *small]) == 0
    assert asked == ["fedpetuning", "fedsoda", "fedsoda", "fedsoda"]
    assert (
        "| FedBiOT | 300.0 | 353.0 | 53.0 |" in (tmp_path / "out" / "fedsoda-memory.md").read_text()
    )


def test_a_mistake_is_told(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["public", *small, "--public", "/nowhere.txt"]) == 2
    assert "/nowhere.txt: cannot be read" in capsys.readouterr().err
    assert set(MEASURED) == set(STUDIES) == set(COMMANDS) - {"tables", "memory"}


# ----- reports ------------------------------------------------------------------------------------


def test_a_report_has_means_spreads_and_signs(tmp_path: Path) -> None:
    study = STUDIES["ablation"]
    path = tmp_path / "fedsoda-ablation"
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, CONDITIONS)
    for seed, (none, both) in enumerate([(4.0, 3.0), (4.2, 3.1), (4.4, 3.2)]):
        for arm, loss in ((CHANCE, 8.0), (DENSE, 5.0), ("none", none), ("both", both)):
            costs = dict.fromkeys(COSTS, 2.0 if arm in ("none", "both") else None)
            figures = {
                **dict.fromkeys((*SCORES, *PERPLEXITIES)),
                "loss": loss,
                "acc": 0.25,
                **costs,
            }
            rows.add({"seed": seed, "arm": arm, "place": IID}, **figures)
    write_report(study, rows, CONDITIONS, path)
    text = path.with_suffix(".md").read_text()
    assert "| chance | 8.000 | 0.250 |" in text
    assert "| none | 4.200 ± 0.200 | 0.250 |" in text
    # 4.303 x 0.1 / sqrt(3)
    assert "| both − none | −1.100 ± 0.248 (−−−) | +0.000 ± 0.000 (000) |" in text
    assert math.isclose(4.303 * 0.1 / math.sqrt(3), 0.248, abs_tol=1e-3)
    assert "| both | 2.00 | 2.00 | 2.00 | 2.0 | 2 |" in text
    # No run has that figure.
    assert "per character" not in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_rounds_until_the_last_loss_of_fedot(tmp_path: Path) -> None:
    curves = {
        (FEDOT, "0"): {0: 5.0, 1: 4.0, 2: 3.5},
        (FEDSODA, "0"): {0: 5.0, 1: 3.5, 2: 3.6},
        (FEDBIOT, "0"): {0: 5.0, 1: 4.0, 2: 3.6},
    }
    assert [rounds_needed(curves, arm, "0") for arm in (FEDOT, FEDSODA, FEDBIOT, "nobody")] == [
        2,
        1,
        None,
        None,
    ]
    study = STUDIES["rounds"]
    path = tmp_path / "fedsoda-rounds"
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, CONDITIONS)
    for (arm, seed), curve in curves.items():
        for number, loss in curve.items():
            rows.add({"seed": seed, "arm": arm, "round": number}, loss=loss)
    write_report(study, rows, CONDITIONS, path)
    text = path.with_suffix(".md").read_text()
    assert "| FedSODA | 5.000 | 3.500 | 3.600 |" in text
    assert "| FedBiOT | not reached |" in text
    assert path.with_suffix(".png").exists()


def test_counting_does_not_wait_for_what_trains() -> None:
    """``tables`` needs no weights, so the program imports no training library at its start."""
    code = (
        "import sys, benchmarks.fedsoda.__main__; sys.exit('torch' in sys.modules or 'flwr' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
