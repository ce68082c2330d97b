"""What the words after ``espalier run`` mean."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from espalier.launch.app_folder import default_config, find_app, read_preset
from espalier.launch.command import main
from espalier.launch.configuration import configuration
from espalier.launch.superlink import RAY_DID_NOT_START, _stop_with_descendants
from espalier.settings.mistakes import FLOWER_REPORTS_IT_TOO, Mistake
from espalier.settings.run import METHODS

APP = Path(__file__).parent.parent.parent
PRESETS = sorted(file.stem for file in (APP / "conf").glob("*.toml"))


def keys(nested: dict[str, object]) -> set[str]:
    found: set[str] = set()
    for key, value in nested.items():
        found |= {f"{key}.{inner}" for inner in keys(value)} if isinstance(value, dict) else {key}
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_complete(name: str) -> None:
    _, settings = configuration(APP, [name], on_this_machine=True)
    others = tuple(f"{name}." for name in set().union(*METHODS.values()) - set(METHODS[settings.method]))
    assert keys(read_preset(APP, name)) == {key for key in keys(default_config(APP)) if not key.startswith(others)}


def test_the_later_word_wins_and_values_are_typed() -> None:
    words = ["two-sites", "num-clients=5", "fedprllm.sparsity=0.7", "evaluation.local-only=false", "data.field=body"]
    config, settings = configuration(APP, words, on_this_machine=True)
    assert (settings.num_clients, settings.fedprllm.sparsity) == (5, 0.7)
    assert settings.evaluation.local_only is False
    assert config["data.field"] == "body"
    assert settings.evaluation.centralized == "off"


def test_paths_mean_what_they_mean_where_the_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "model=m",
        "evaluation.texts=documentation,w=a/w.txt",
        "data.source=text",
        "data.path=t{rank}.txt",
        "task.test-path=q.jsonl",
    ]
    config, _ = configuration(APP, words, on_this_machine=True)
    assert config["model"] == str(tmp_path / "m")
    assert config["evaluation.texts"] == f"documentation,w={tmp_path}/a/w.txt"
    assert config["data.path"] == f"{tmp_path}/t{{rank}}.txt"
    assert config["task.test-path"] == str(tmp_path / "q.jsonl")
    assert config["out-dir"] == str(tmp_path / "runs")
    assert config["resume-from"] == ""
    assert configuration(APP, [], on_this_machine=True)[0]["task.test-path"] == ""
    elsewhere, _ = configuration(APP, words, on_this_machine=False)
    assert (elsewhere["model"], elsewhere["out-dir"]) == ("m", "runs")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("hetlora.ranks=8", "8"),
        ("lora.layers=1", "1"),
        ("hetlora.ranks='8'", "8"),
        ("resume-from=2024-05-01", "2024-05-01"),
    ],
)
def test_what_is_a_string_by_default_stays_one(word: str, value: str) -> None:
    config, _ = configuration(APP, ["hetlora", "hetlora.ranks=8", word], on_this_machine=False)
    assert config[word.partition("=")[0]] == value


def test_mistakes_are_told_at_once_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "seed=-1", "fedprllm.sparsty=0.3", "data.windows=many", "--app", str(APP)]) == 2
    told = capsys.readouterr().err
    assert "seed = -1" in told
    assert "did you mean 'fedprllm.sparsity'?" in told
    assert "data.windows = 'many'" in told


def test_words_may_follow_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "two-sites", "--app", str(APP), "seed=-1"]) == 2
    assert "seed = -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--nods", "3", "--app", str(APP)])


def test_an_unknown_preset_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedprlm", "--app", str(APP)]) == 2
    assert "known presets are fedpetuning, fedprllm" in capsys.readouterr().err


def test_fewer_nodes_than_clients_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nodes", "3", "--app", str(APP)]) == 2
    assert "fewer than num-clients = 8" in capsys.readouterr().err


def test_the_app_is_the_given_folder_or_none(tmp_path: Path) -> None:
    assert find_app(str(APP)) == APP
    with pytest.raises(Mistake, match="no Espalier app in"):
        find_app(str(tmp_path))


RAY_FAILED = """Traceback (most recent call last):
  File "/x/flwr/server/superlink/fleet/vce/backend/raybackend.py", line 119, in init_ray
    ray.init(
"""


def test_only_ray_s_failure_to_start_is_tried_again() -> None:
    assert RAY_DID_NOT_START.search(RAY_FAILED)
    assert not RAY_DID_NOT_START.search("RunFailed: 0 clients enrolled")
    assert not RAY_DID_NOT_START.search(RAY_FAILED.replace("init_ray", "process_message"))


@pytest.mark.parametrize(("failures", "code", "starts"), [(0, 0, 1), (2, 0, 3), (3, 1, 3)])
def test_ray_is_started_up_to_three_times(
    failures: int, code: int, starts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [("finished:failed", "it crashed", RAY_FAILED)] * failures + [("finished:completed", "", "")]
    given = iter(outcomes)
    monkeypatch.setattr("espalier.launch.command._run", lambda *_: next(given))
    monkeypatch.setattr("espalier.launch.command.own_superlink", nullcontext)
    assert main(["run", "--app", str(APP)]) == code
    assert len(outcomes) - len(list(given)) == starts
    assert capsys.readouterr().err.count("trying again") == starts - 1


def test_stopping_a_process_stops_what_moved_to_a_session_of_its_own() -> None:
    child = (
        "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True); print(p.pid, flush=True); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    sleeping = psutil.Process(int(process.stdout.readline()))
    _stop_with_descendants(process)
    assert process.returncode is not None
    assert not sleeping.is_running() or sleeping.status() == psutil.STATUS_ZOMBIE


def test_a_run_that_said_why_it_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray complains too when a ServerApp ends while Ray starts."""
    runs = []

    def run(*_: object) -> tuple[str, str, str]:
        runs.append(1)
        return "finished:failed", "", f"the run failed: x\n{FLOWER_REPORTS_IT_TOO}\n{RAY_FAILED}"

    monkeypatch.setattr("espalier.launch.command._run", run)
    monkeypatch.setattr("espalier.launch.command.own_superlink", nullcontext)
    assert main(["run", "--app", str(APP)]) == 1
    assert len(runs) == 1
