"""``espalier run``: its help, places of app and model, and failures of Ray or a SuperLink."""

import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
from huggingface_hub import close_session

import espalier
from espalier.cli.command import main
from espalier.errors import FLOWER_REPORTS_IT_TOO, EspalierError
from espalier.flower.run_command import RAY_DID_NOT_START, RunCommand
from espalier.hf.opening.opened_model import open_model
from espalier.launch.app import find_app
from espalier.launch.configuration import configuration
from espalier.launch.run import WatchedRun
from espalier.launch.superlink import running_superlink
from tests.launch.test_configuration import APP


def test_the_app_is_the_given_folder_or_none(tmp_path: Path) -> None:
    assert find_app(str(APP)) == APP
    with pytest.raises(EspalierError, match="no Espalier app in"):
        find_app(str(tmp_path))


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("usage: espalier")
    assert "espalier run fedprllm" in told.out
    assert told.err == ""


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"espalier {espalier.__version__}\n")
    assert (
        espalier.__version__
        == tomllib.loads((APP / "pyproject.toml").read_text())["project"]["version"]
    )


def test_it_tells_where_the_app_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["app"]) == 0
    assert capsys.readouterr().out == f"{APP}\n"
    with pytest.raises(SystemExit):
        main(["app", "further"])


def test_hub_model_must_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()
    assert main(["run", "model=meta-llama/Llama-2-7b", "--app", str(APP)]) == 2
    close_session()
    told = capsys.readouterr().err
    assert "model = 'meta-llama/Llama-2-7b': there is no such directory, and the model" in told
    assert "HF_HUB_OFFLINE is set; unset it, or name the directory of a copy" in told


@pytest.mark.parametrize("name", ["gpt2", "opt-125m"])
def test_name_without_an_owner_gets_a_hint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        EspalierError,
        match=(
            f"model = '{name}': there is no directory .*name it with its owner .model=OWNER/{name}"
        ),
    ):
        configuration(APP, [f"model={name}"], on_this_machine=True)
    with pytest.raises(EspalierError, match=f"model=OWNER/{name}"):
        open_model(name)
    (tmp_path / name).mkdir()
    assert configuration(APP, [f"model={name}"], on_this_machine=True)[0]["model"] == str(
        tmp_path / name
    )
    configuration(APP, ["model=demo"], on_this_machine=True)


@pytest.mark.parametrize("key", ["model", "data.path"])
def test_an_address_is_no_path(key: str) -> None:
    with pytest.raises(
        EspalierError, match=f"{key} = 'https://a.org/b': is an address; .*OWNER/NA"
    ):
        configuration(APP, [f"{key}=https://a.org/b"], on_this_machine=True)


@pytest.mark.parametrize("words", [["data.source=files"], []])
def test_hub_dataset_name_gets_a_source_hint(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*words, "data.path=allenai/c4"]
    with pytest.raises(
        EspalierError,
        match=(
            r"data.path = 'allenai/c4': there is no file .* data.source = 'files' needs"
            r" one.*'hub'"
        ),
    ):
        configuration(APP, words, on_this_machine=True)
    assert configuration(APP, words, on_this_machine=False)[0]["data.path"] == "allenai/c4"
    (tmp_path / "allenai").mkdir()
    (tmp_path / "allenai" / "c4").write_text("x")
    assert configuration(APP, words, on_this_machine=True)[0]["data.path"] == str(
        tmp_path / "allenai" / "c4"
    )


def test_directory_named_like_hub_model_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    config, _ = configuration(APP, ["model=models/llama"], on_this_machine=True)
    assert config["model"] == str(tmp_path / "models" / "llama")


def test_remote_model_is_not_looked_for_here() -> None:
    config, _ = configuration(APP, ["model=models/llama"], on_this_machine=False)
    assert config["model"] == "models/llama"


RAY_FAILED = """Traceback (most recent call last):
  File "/x/flwr/server/superlink/fleet/vce/backend/raybackend.py", line 119, in init_ray
    ray.init(
"""


def test_only_a_failed_ray_start_is_repeated() -> None:
    assert RAY_DID_NOT_START.search(RAY_FAILED)
    assert not RAY_DID_NOT_START.search("RunFailed: 0 clients enrolled")
    assert not RAY_DID_NOT_START.search(RAY_FAILED.replace("init_ray", "process_message"))


@pytest.mark.parametrize(("failures", "code", "starts"), [(0, 0, 1), (2, 0, 3), (3, 1, 3)])
def test_ray_is_started_up_to_three_times(
    failures: int,
    code: int,
    starts: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes = [("finished:failed", "it crashed", RAY_FAILED)] * failures + [
        ("finished:completed", "", "")
    ]
    given = iter(outcomes)
    monkeypatch.setattr("espalier.launch.run._run", lambda *_: next(given))
    monkeypatch.setattr("espalier.launch.run.own_superlink", nullcontext)
    assert main(["run", "--app", str(APP), "--no-measure"]) == code
    assert len(outcomes) - len(list(given)) == starts
    assert capsys.readouterr().err.count("trying again") == starts - 1


def test_unreachable_superlink_hints_certificates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flower's message is the one for a SuperLink with TLS and a client without a certificate."""
    said = (
        "\nConnection to the SuperLink is unavailable. Please check your network connection and"
        " 'address' in the ..."
    )
    monkeypatch.setattr(RunCommand, "_ask", lambda *_: {"success": False, "error-message": said})
    with (
        running_superlink("127.0.0.1:1", None) as superlink,
        pytest.raises(EspalierError, match="with --root-certificates"),
    ):
        superlink.start_run(APP, tmp_path / "run.toml")


def test_explained_failure_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray also complains if a ServerApp ends while Ray starts."""
    runs = []

    def run(*_: object) -> tuple[str, str, str]:
        runs.append(1)
        return "finished:failed", "", f"the run failed: x\n{FLOWER_REPORTS_IT_TOO}\n{RAY_FAILED}"

    monkeypatch.setattr("espalier.launch.run._run", run)
    monkeypatch.setattr("espalier.launch.run.own_superlink", nullcontext)
    assert main(["run", "--app", str(APP), "--no-measure"]) == 1
    assert len(runs) == 1


def test_models_are_measured_after_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def simulated(watched: WatchedRun, *_: object) -> None:
        calls.append("simulated")
        watched.directory = str(tmp_path / "a-run")

    def called(app: Path, module: str, document: object) -> int:
        calls.append(f"{module} {document}")
        return 0

    monkeypatch.setattr("espalier.cli.run_request.simulate", simulated)
    monkeypatch.setattr("espalier.cli.run_request.submit", simulated)
    monkeypatch.setattr("espalier.cli.run_request.run_in_app", called)
    assert main(["run", "--app", str(APP), "--no-measure"]) == 0
    # The result of a run on a SuperLink is on that machine.
    assert main(["run", "--app", str(APP), "--superlink", "127.0.0.1:9093"]) == 0
    assert calls == ["simulated", "simulated"]
    assert main(["run", "--app", str(APP)]) == 0
    expected = {"directory": str(tmp_path / "a-run")}
    assert calls[2:] == ["simulated", f"espalier.results.report.after_run {expected}"]


def test_interrupted_measurement_tells_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulated(watched: WatchedRun, *_: object) -> None:
        watched.directory = str(tmp_path / "a-run")

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("espalier.cli.run_request.simulate", simulated)
    monkeypatch.setattr("espalier.cli.run_request.run_in_app", interrupted)
    assert main(["run", "--app", str(APP)]) == 130
    told = capsys.readouterr().err
    assert f"`espalier report {tmp_path / 'a-run'} --measure`" in told
    assert "resume" not in told
