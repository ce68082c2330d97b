"""ServerApp of docs/how-to/own-server-app.md, run over a grid in this process."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from espalier.errors import InputError
from strategies.base.new_run import new_run
from tests.bench import Bench

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "own-server-app.md").read_text()
CLIENT, SERVER = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def page_s_server_app() -> Any:
    """Return the ServerApp whose source is on the page."""
    source = SERVER
    assert len([line for line in source.splitlines() if line.strip()]) <= 22
    names: dict[str, Any] = {}
    exec(compile(source, "my_server.py", "exec"), names)
    return names["app"]


@pytest.mark.parametrize("source", [CLIENT, SERVER])
def test_both_modules_assign_their_app(source: str) -> None:
    """Flower looks for an assignment at the top of the module; an import is not found."""
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    assert [target.id for node in assigned for target in node.targets] == ["app"]  # type: ignore[attr-defined]


def test_app_installs_nothing() -> None:
    """The package ``espalier`` of PyPI is another program, which Flower would install."""
    (pyproject,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert tomllib.loads(pyproject)["project"]["dependencies"] == []


def context(bench: Bench, run_id: int, **changes: Any) -> Context:
    return Context(run_id, 0, {}, RecordDict(), bench.config(**changes))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, "flap", {"pruning.ratio": 0.3}, num_clients=2)


def test_page_s_server_app_gives_the_model_of_a_run(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = bench.run() / "model"
    changes = {"out_dir": str(tmp_path / "own")}
    page_s_server_app()(bench.grid(**changes), context(bench, 7, **changes))
    (written,) = (tmp_path / "own").glob("*-flap-7/model")
    names = {file.name for file in expected.iterdir()} - {"README.md"}
    assert "model.safetensors" in names
    assert {file.name for file in written.iterdir()} == names
    for name in names:
        assert (written / name).read_bytes() == (expected / name).read_bytes()
    assert re.search(r"^[\d,]+ of [\d,]+ parameters$", capsys.readouterr().out, re.MULTILINE)


def test_wrong_settings_start_nothing(bench: Bench, tmp_path: Path) -> None:
    changes = {"pruning__ratio": 7.0}
    with pytest.raises(InputError, match=r"pruning\.ratio = 7"):
        new_run(bench.grid(**changes), context(bench, 1, **changes))
    assert bench.runs() == set()


def test_unwritable_directory_is_told(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    changes = {"out_dir": str(tmp_path / "file")}
    with pytest.raises(InputError, match=r"out-dir = .*file.* cannot be made"):
        new_run(bench.grid(**changes), context(bench, 1, **changes))
