"""Grid of settings (``espalier sweep``): its cells, its checks, and how it continues."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.cli import sweep as module
from espalier.cli.command import main
from espalier.cli.run_request import RunRequest
from espalier.errors import InputError
from espalier.launch.configuration import configuration
from espalier.launch.sweep_folder import last_run, locked_sweep, words_of
from espalier.launch.sweep_grid import MAX_CHARACTERS, Cell, cells_of, split_values

ROOT = Path(__file__).parents[3]


# ----- grid ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,0.2", ["0.1", "0.2"]),
        ("", [""]),
        ("a , b", ["a", "b"]),
        ('"attn.q,attn.v",all', ['"attn.q,attn.v"', "all"]),
        ("all,'x,y'", ["all", "'x,y'"]),
        ("it's,that's", ["it's", "that's"]),
        ("wiki=/a.txt,code", ["wiki=/a.txt", "code"]),
    ],
)
def test_values_are_split_at_commas_outside_of_quotes(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("text", "reason"),
    [('"a,b', "is not closed"), ("a,,b", "is empty"), ("a,", "is empty"), ("1,2,1", "twice")],
)
def test_wrong_values_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        split_values(text)


def test_grid_is_the_product_with_the_last_word_fastest() -> None:
    cells = cells_of(["flap,slicegpt", "num-clients=2", "seed=0,1"])
    assert cells == [
        Cell(("flap", "num-clients=2", "seed=0"), "flap_seed=0"),
        Cell(("flap", "num-clients=2", "seed=1"), "flap_seed=1"),
        Cell(("slicegpt", "num-clients=2", "seed=0"), "slicegpt_seed=0"),
        Cell(("slicegpt", "num-clients=2", "seed=1"), "slicegpt_seed=1"),
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["flap", "seed=0"], "no word has several values"),
        ([], "no word has several values"),
        (["seed=0,1", "seed=2"], "seed: is given twice"),
        (["flap", "seed", "0,1"], "more than one preset: flap seed 0,1"),
        (["seed=0,1", "out-dir=x"], "out-dir: is set by the sweep"),
        (["seed=0,1", "resume-from=x"], "resume-from: is set by the sweep"),
        ([f"seed={','.join(map(str, range(1001)))}"], "1001 cells"),
    ],
)
def test_wrong_grids_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        cells_of(words)


def test_names_are_directories_of_their_own() -> None:
    cells = cells_of([f"model=/a/b,/a-b,{'x' * 300}", "seed=0,1"])
    names = [cell.name for cell in cells]
    assert len(set(names)) == 6
    assert all("/" not in name and len(name) < MAX_CHARACTERS + 10 for name in names)


def test_quoted_value_is_the_setting() -> None:
    (cell, _) = cells_of(["fedpetuning", 'lora.targets="attn.q,attn.k",all'])
    _, settings = configuration(ROOT, cell.words, on_this_machine=True)
    assert settings.lora.targets == "attn.q,attn.k"


# ----- cells on disk ------------------------------------------------------------------------------


def save(folder: Path, name: str, status: str | None) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    if status is not None:
        (run / "summary.json").write_text(json.dumps({"status": status}))
    return run


@pytest.mark.parametrize("status", [None, "running", "failed"])
def test_last_run_of_a_cell_is_resumed_unless_completed(tmp_path: Path, status: str | None) -> None:
    cell = Cell(("flap", "seed=0"), "seed=0")
    assert words_of(cell, tmp_path) == ["flap", "seed=0", f"out-dir={tmp_path}"]
    save(tmp_path, "1", "failed")
    newest = save(tmp_path, "2", status)
    words = words_of(cell, tmp_path)
    assert words == ["flap", "seed=0", f"out-dir={tmp_path}", f"resume-from={newest}"]
    assert last_run(tmp_path) == newest
    (newest / "summary.json").write_text('{"status": "completed"}')
    assert words_of(cell, tmp_path) is None


# ----- the command --------------------------------------------------------------------------------


class Runs:
    """Replacement for ``espalier run`` and the modules of the app; it writes run directories."""

    def __init__(self) -> None:
        self.codes: dict[str, int | Exception] = {}
        """Exit code or error by the name of a cell; 0 if it is not here."""
        self.started: list[list[str]] = []
        self.in_app: list[tuple[str, Any]] = []
        self.refused = 0

    def run(self, given: RunRequest) -> int:
        self.started.append(list(given.words))
        settings = dict(word.split("=", 1) for word in given.words if "=" in word)
        folder = Path(settings["out-dir"])
        code = self.codes.get(folder.name, 0)
        name = Path(settings.get("resume-from", folder / "run")).name
        status = {0: "completed", 130: "running"}.get(
            code if isinstance(code, int) else 1, "failed"
        )
        if not (folder / name).exists():
            save(folder, name, status)
        (folder / name / "summary.json").write_text(json.dumps({"status": status}))
        if isinstance(code, Exception):
            raise code
        return code

    def run_in_app(self, _: Path, name: str, document: Any) -> int:
        self.in_app.append((name, document))
        return self.refused if name == "server_app.preflight" else 0

    @property
    def cells(self) -> list[str]:
        """Names of the cells that were run."""
        return [
            word.rpartition("/")[2] for words in self.started for word in words if "out-dir" in word
        ]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    monkeypatch.setattr(module, "run", found.run)
    monkeypatch.setattr(module, "run_in_app", found.run_in_app)
    return found


WORDS = ["flap", "num-clients=2", "pruning.ratio=0.1,0.2,0.3"]


def sweep(out: Path, *words: str) -> int:
    return main(["sweep", *(words or WORDS), "--out", str(out)])


def test_each_cell_is_a_simulation_without_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = []
    monkeypatch.setattr(module, "run_in_app", lambda *_: 0)
    monkeypatch.setattr(
        "espalier.cli.run_request.simulate", lambda *given: simulated.append(given[2])
    )
    assert sweep(tmp_path / "out") == 0
    assert [config["pruning.ratio"] for config in simulated] == [0.1, 0.2, 0.3]


def test_all_cells_are_run_and_compared(tmp_path: Path, runs: Runs) -> None:
    assert sweep(tmp_path / "out") == 0
    names = [f"pruning.ratio={ratio}" for ratio in (0.1, 0.2, 0.3)]
    assert runs.cells == names
    (check, checked), (comparison, compared) = runs.in_app
    assert (check, comparison) == ("server_app.preflight", "espalier.results.comparison.command")
    assert list(checked["cells"]) == names
    assert checked["cells"][names[1]]["pruning.ratio"] == 0.2
    assert compared["labels"] == names
    assert compared["runs"] == [str(tmp_path / "out" / name / "run") for name in names]
    assert compared["out"] == [
        str(tmp_path / "out" / f"comparison.{end}") for end in ("html", "csv")
    ]


def test_finished_cells_are_not_run_again_and_others_are_resumed(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed cell does not end the sweep; an interrupt does."""
    first, second, third = (f"pruning.ratio={ratio}" for ratio in (0.1, 0.2, 0.3))
    runs.codes = {first: InputError("no"), third: 130}
    assert sweep(tmp_path) == 130
    assert runs.cells == [first, second, third]
    assert "interrupted; the same command continues" in capsys.readouterr().err
    runs.started.clear()
    runs.in_app.clear()
    runs.codes = {third: 1}
    assert sweep(tmp_path) == 1
    assert runs.cells == [first, third]
    assert all(words[-1].startswith("resume-from=") for words in runs.started)
    assert list(runs.in_app[0][1]["cells"]) == [first, third]
    said = capsys.readouterr()
    assert f"cell 2 of 3: {second} is completed" in said.out
    assert f"failed: {third} (remove {tmp_path / third} to start it again)" in said.err
    runs.codes = {}
    runs.started.clear()
    assert sweep(tmp_path) == 0
    assert runs.cells == [third]
    runs.in_app.clear()
    assert sweep(tmp_path) == 0
    # Nothing is left to check, and the comparison is made again.
    assert [name for name, _ in runs.in_app] == ["espalier.results.comparison.command"]


def test_an_unexpected_error_ends_only_its_cell(tmp_path: Path, runs: Runs) -> None:
    runs.codes = {"pruning.ratio=0.1": RuntimeError("odd")}
    assert sweep(tmp_path) == 1
    assert len(runs.cells) == 3


def test_no_cell_starts_if_one_is_wrong(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path / "out", "flap", "pruning.ratio=0.1,7", "num-clients=0,1") == 2
    said = capsys.readouterr().err
    assert "cells pruning.ratio=7_num-clients=1" in said.replace("cell ", "cells ")
    assert said.count("num-clients = 0") == 2
    assert (runs.started, runs.in_app) == ([], [])
    assert not (tmp_path / "out").exists()
    runs.refused = 2
    assert sweep(tmp_path / "out") == 2
    assert runs.started == []


def test_check_starts_nothing(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *WORDS, "--out", str(tmp_path / "out"), "--check"]) == 0
    assert "pruning.ratio=0.2: flap num-clients=2 pruning.ratio=0.2" in (capsys.readouterr().out)
    assert (runs.started, (tmp_path / "out").exists()) == ([], False)


def test_a_directory_belongs_to_one_sweep(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Further cells may be added, with the same other settings."""
    assert sweep(tmp_path) == 0
    assert sweep(tmp_path, "flap", "num-clients=3", "pruning.ratio=0.1,0.2") == 2
    assert "num-clients was 2, is 3" in capsys.readouterr().err
    runs.started.clear()
    assert sweep(tmp_path, "flap", "num-clients=2", "pruning.ratio=0.3,0.4") == 0
    assert runs.cells == ["pruning.ratio=0.4"]
    assert len(json.loads((tmp_path / "sweep.json").read_text())["cells"]) == 4
    (tmp_path / "sweep.json").write_text("[]")
    assert sweep(tmp_path) == 2
    assert "is damaged" in capsys.readouterr().err
    with locked_sweep(tmp_path):
        assert sweep(tmp_path) == 2
    assert "another sweep works there" in capsys.readouterr().err


def test_a_directory_with_something_else_is_refused(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "out", "20261129-000000-flap-1", "completed")
    assert sweep(tmp_path / "out") == 2
    assert "and no sweep.json, so it is not the directory of a sweep" in capsys.readouterr().err
    assert runs.started == []
