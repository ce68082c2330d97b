"""``espalier run METHOD --recover``: which settings each run gets, and what happens in between."""

from pathlib import Path
from typing import Any

import pytest

from espalier.cli import recovery
from espalier.cli.command import main
from espalier.cli.run_request import RunRequest

APP = Path(__file__).parent.parent.parent.parent


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        (
            ["flap", "num-clients=2", "pruning.ratio=0.4", "training.steps=3"],
            ["flap", "num-clients=2", "pruning.ratio=0.4"],
            ["recover", "num-clients=2", "training.steps=3"],
        ),
        (
            ["llm-pruner", "model=/m", "data.path=/d.txt", "data.num-samples=4", "seed=2"],
            ["llm-pruner", "model=/m", "data.path=/d.txt", "data.num-samples=4", "seed=2"],
            ["recover", "data.path=/d.txt", "seed=2"],
        ),
        # The preset has four clients; its own settings of training are another table's.
        (["llm-streamline"], ["llm-streamline"], ["recover", "num-clients=4"]),
        # A conversation has no column of text, so only the first run reads its name.
        (
            ["flap", "data.path=/d.jsonl", "data.field=note", "task.name=chat"],
            ["flap", "data.path=/d.jsonl", "data.field=note"],
            ["recover", "data.path=/d.jsonl", "task.name=chat"],
        ),
        # The preset recover has another value.
        (
            ["flap", "data.sequence-length=64"],
            ["flap", "data.sequence-length=64"],
            ["recover", "data.sequence-length=64"],
        ),
        # No run reads it: the first one refuses it.
        (["flap", "sft-p.alpha=1"], ["flap", "sft-p.alpha=1"], ["recover"]),
        (["flap", "resume-from=/r"], ["flap", "resume-from=/r"], ["recover"]),
    ],
)
def test_each_run_gets_the_settings_that_it_reads(
    words: list[str], first: list[str], second: list[str]
) -> None:
    assert recovery.words_of_runs(APP, words) == (first, second)


def test_settings_of_a_file_hold_for_both_runs(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'method = "flap"\nnum-clients = 3\nmodel = "/m"\n[data]\npath = "/d.txt"\n'
        "sequence-length = 64\n[pruning]\nratio = 0.4\n"
    )
    own, further = recovery.words_of_runs(APP, [str(file)])
    assert own == [str(file)]
    assert further == [
        "recover", "num-clients=3", "data.path=/d.txt", "data.sequence-length=64",
    ]  # fmt: skip


class Runs:
    """Replacement for ``espalier run``; it writes run directories."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.codes = [0, 0]
        self.requests: list[RunRequest] = []
        self.compared: list[dict[str, Any]] = []

    def run_to_end(self, request: RunRequest) -> tuple[int, str]:
        self.requests.append(request)
        folder = self.out / str(len(self.requests))
        folder.mkdir()
        return self.codes[len(self.requests) - 1], str(folder)

    def run_in_app(self, _: Path, module: str, document: dict[str, Any]) -> int:
        assert module == "espalier.results.comparison.command"
        self.compared.append(document)
        return 2


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs(tmp_path)
    monkeypatch.setattr(recovery, "run_to_end", found.run_to_end)
    monkeypatch.setattr(recovery, "run_in_app", found.run_in_app)
    return found


WORDS = ["run", "flap", "num-clients=2", "--recover", "--no-measure", "--app", str(APP)]


def test_result_of_the_first_run_is_tuned(tmp_path: Path, runs: Runs) -> None:
    assert main(WORDS) == 0
    pruning, tuning = runs.requests
    assert pruning.words == ["flap", "num-clients=2"]
    assert tuning.words == ["recover", "num-clients=2", f"model={tmp_path / '1' / 'model'}"]
    # An interrupted second run is resumed without the first one.
    assert tuning.arguments == ["run", *tuning.words, "--no-measure", "--app", str(APP)]
    (compared,) = runs.compared
    assert compared["runs"] == [str(tmp_path / "1"), str(tmp_path / "2")]
    assert compared["labels"] == ("pruned", "tuned")


@pytest.mark.parametrize(
    "words", [["fedprllm"], ["fedspallm"], ["pooled-pruning"], ["flap", "pruning.form=zero-filled"]]
)
def test_zeros_of_a_sparse_model_are_kept(runs: Runs, words: list[str]) -> None:
    assert main(["run", *words, "--recover", "--app", str(APP)]) == 0
    assert "lora.keep-zeros=true" in runs.requests[1].words


def test_word_decides_on_zeros(runs: Runs) -> None:
    given = "lora.keep-zeros=false"
    assert main(["run", "fedprllm", given, "--recover", "--app", str(APP)]) == 0
    words = runs.requests[1].words
    assert [word for word in words if word.startswith("lora.keep-zeros")] == [given]


def test_nothing_is_tuned_after_an_incomplete_run(runs: Runs) -> None:
    runs.codes[0] = 130
    assert main(WORDS) == 130
    assert len(runs.requests) == 1
    assert not runs.compared


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["fedpetuning"], "fedpetuning tunes the model itself"),
        (["flap", "--superlink", "127.0.0.1:9"], "on a SuperLink"),
        (["flap", "training.steps=0"], "training.steps"),
        (["flap", "pruning.sparsty=0.3"], "pruning.sparsty"),
        (["fedprllm", "lora.merge=false"], "adapters alone would fill the zeros"),
    ],
)
def test_wrong_requests_start_nothing(
    runs: Runs, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert main(["run", *words, "--recover", "--app", str(APP)]) == 2
    assert error in capsys.readouterr().err
    assert not runs.requests
