"""Notebook of docs/, whose cells run as a program with real Flower processes."""

import json
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "docs" / "how-to" / "python.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_notebook_has_no_outputs() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)


@pytest.mark.processes
def test_cells_of_the_notebook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in CELLS:
        exec(compile("".join(cell["source"]), "python.ipynb", "exec"), names)
    out = capsys.readouterr().out
    assert "prune_ratio: there is no such setting; did you mean pruning_ratio?" in out
    assert "This function returns" in out
    assert names["again"].path == names["result"].path  # type: ignore[attr-defined]
