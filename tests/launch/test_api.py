"""``espalier.simulate`` and ``espalier.submit``: settings, progress, results and errors."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import espalier
from espalier.errors import FLOWER_REPORTS_IT_TOO
from espalier.launch.configuration import configuration
from espalier.launch.superlink import SuperLinkLost
from espalier.settings.reference.keywords import keyword_of, settings_from
from tests.pages.keyword_types import FILE, keywords_module
from tests.pages.schema import keys_of_a_run

APP = Path(__file__).parents[2]
NOTHING_PRINTED = ("", "")


class Scripted:
    """SuperLink with a scripted log and a scripted end; it notes the configuration of the run."""

    def __init__(self, folder: Path, log: list[Any], end: Any, own: bool) -> None:
        self.folder = folder
        self.process = object() if own else None
        self.log = log
        self.end = end
        self.options: tuple[str, ...] = ()
        self.stopped = False

    def start_run(self, _: Path, __: Path, *options: str) -> str:
        self.options = options
        return "1"

    def stream_log(self, _: str) -> Iterator[str]:
        for line in self.log:
            if not isinstance(line, str):
                raise line
            yield line

    def status(self, _: str) -> tuple[str, str]:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end, "details"

    def stop_run(self, _: str) -> None:
        self.stopped = True


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    """Return a function that puts a scripted SuperLink in place of real ones."""

    def put(log: list[Any], end: Any = "finished:completed", own: bool = True) -> Scripted:
        scripted = Scripted(tmp_path, log, end, own)

        @contextmanager
        def opened(*_: object) -> Iterator[Scripted]:
            yield scripted

        monkeypatch.setattr("espalier.launch.run.own_superlink", opened)
        monkeypatch.setattr("espalier.launch.run.running_superlink", opened)
        monkeypatch.setattr("espalier.launch.run.warn_of_open_control_api", lambda _: None)
        return scripted

    return put


def directory_line(folder: Path, status: str = "completed") -> str:
    """Return the log line that names a run directory with this status."""
    folder.mkdir(exist_ok=True)
    metrics = [
        {
            "name": "perplexity",
            "dataset": "text",
            "direction": "lower",
            "values": {"federated": 2.5},
        }
    ]
    summary = {"status": status, "method": "flap", "metrics": metrics}
    (folder / "summary.json").write_text(json.dumps(summary))
    return f"run directory {folder}\n"


# ----- settings -----------------------------------------------------------------------------------


def test_every_setting_has_one_keyword() -> None:
    keys = [key.dotted for key in keys_of_a_run()]
    assert len({keyword_of(key) for key in keys}) == len(keys)
    assert settings_from({"lora_rank": 8, "num_clients": 2, "data_path": Path("a/b")}) == {
        "lora.rank": 8, "num-clients": 2, "data.path": "a/b",
    }  # fmt: skip


def test_keyword_types_are_written_from_the_schema() -> None:
    """Run ``python -m tests.pages.settings_page`` to update the file."""
    text = (APP / FILE).read_text()
    assert text == keywords_module()
    (keywords,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    names = [node.target.id for node in keywords.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    assert names == [keyword_of(key.dotted) for key in keys_of_a_run()]


def test_unknown_keyword_is_told() -> None:
    with pytest.raises(espalier.InputError, match="lora_rnk: there is no such setting; did you m"):
        espalier.simulate("fedpetuning", lora_rnk=8)  # type: ignore[call-arg]


def test_errors_are_those_of_the_command() -> None:
    words = ["flap", "lora.rank=3", "num-clients=none"]
    with pytest.raises(espalier.InputError) as of_command:
        configuration(APP, words, on_this_machine=True)
    with pytest.raises(espalier.InputError) as found:
        espalier.simulate("flap", lora_rank=3, num_clients="none", app=APP)  # type: ignore[arg-type]
    assert str(found.value) == str(of_command.value)


def test_package_imports_no_library() -> None:
    program = (
        "import sys, espalier\n"
        "espalier.simulate, espalier.submit, espalier.load_result, espalier.Result\n"
        "print([name for name in ('torch', 'flwr', 'transformers', 'peft', 'ray', 'pydantic')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n"
    assert set(espalier.__all__) <= set(dir(espalier))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        espalier.simulat  # noqa: B018


# ----- runs ---------------------------------------------------------------------------------------


def test_simulation_returns_its_result(
    superlink: Callable[..., Scripted], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = superlink([directory_line(tmp_path / "run"), "round 1\n"])
    result = espalier.simulate("flap", num_clients=3, threads=1, gpus_per_client=0.5, app=APP)
    assert result.path == tmp_path / "run"
    assert result.metrics[0]["values"]["federated"] == 2.5
    assert "num-supernodes=3" in scripted.options[1]
    assert "client-resources-num-gpus=0.5" in scripted.options[1]
    assert capsys.readouterr().out.endswith("round 1\n")
    espalier.simulate("flap", app=APP, progress=False)
    assert capsys.readouterr() == NOTHING_PRINTED


def test_reason_of_a_failed_run_is_in_the_error(
    superlink: Callable[..., Scripted], tmp_path: Path
) -> None:
    line = directory_line(tmp_path / "run", "failed")
    log = [line, f"\nthe run failed: 0 clients\nenrolled\n{FLOWER_REPORTS_IT_TOO}\n", "Traceback"]
    superlink([part for text in log for part in text.splitlines(keepends=True)], "finished:failed")
    with pytest.raises(espalier.RunError, match="the run ended as finished:failed") as found:
        espalier.simulate("flap", app=APP, progress=False)
    assert found.value.reason == "0 clients\nenrolled"
    assert found.value.reason in str(found.value)
    assert found.value.path == tmp_path / "run"


def test_lost_superlink_says_how_to_resume(
    superlink: Callable[..., Scripted], tmp_path: Path
) -> None:
    superlink([directory_line(tmp_path / "run", "failed")], SuperLinkLost("it was killed"))
    expected = rf"it was killed\n.*\n +espalier.simulate\('flap', resume_from='{tmp_path}/run'"
    with pytest.raises(espalier.RunError, match=expected):
        espalier.simulate("flap", app=APP, progress=False)


def test_interrupt_ends_the_run(superlink: Callable[..., Scripted], tmp_path: Path) -> None:
    superlink([directory_line(tmp_path / "run", "running"), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt) as found:
        espalier.simulate("flap", app=APP, progress=False)
    assert isinstance(found.value, espalier.RunInterrupted)
    assert found.value.path == tmp_path / "run"
    assert f"resume_from='{tmp_path}/run'" in str(found.value)
    superlink([KeyboardInterrupt()])
    with pytest.raises(espalier.RunInterrupted, match="call the function again") as early:
        espalier.simulate("flap", app=APP, progress=False)
    assert early.value.path is None


def test_interrupt_stops_a_submitted_run(
    superlink: Callable[..., Scripted], tmp_path: Path
) -> None:
    log = [directory_line(tmp_path / "run", "running"), KeyboardInterrupt()]
    scripted = superlink(log, "finished:stopped", own=False)
    with pytest.raises(espalier.RunInterrupted, match=r"espalier\.submit"):
        espalier.submit("two-sites", superlink="h:1", app=APP, progress=False)
    assert scripted.stopped


def test_submitted_run_has_its_directory_elsewhere(superlink: Callable[..., Scripted]) -> None:
    superlink(["run directory /on/the/server\n"], own=False)
    result = espalier.submit("two-sites", superlink="h:1", app=APP, progress=False)
    assert str(result.path) == "/on/the/server"
    with pytest.raises(espalier.InputError, match=r"copy the directory .* espalier\.load_result"):
        result.metrics  # noqa: B018
    with pytest.raises(espalier.InputError, match="port"):
        espalier.submit("two-sites", superlink="h", app=APP)


def test_refused_data_are_an_input_error(
    superlink: Callable[..., Scripted],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Progress and warnings of the check are shown; its error, of two lines, is only raised."""
    lines = ["espalier: client 0: reading\n", "a warning\n", "espalier: no file\n", "  no data\n"]

    def run_in_app(_: Path, __: str, ___: Any, hear: Callable[[str], None]) -> int:
        for line in lines:
            hear(line)
        return 2

    superlink([])
    monkeypatch.setattr("espalier.launch.run.run_in_app", run_in_app)
    with pytest.raises(espalier.InputError) as found:
        espalier.simulate("flap", app=APP)
    assert str(found.value) == "no file\n  no data"
    assert capsys.readouterr().err == "".join(lines[:2])
