"""Machines without bitsandbytes, which is an extra.

NF4 is refused early, and all other tuning works without the library.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from espalier.cli.command import main
from espalier.errors import EspalierError
from espalier.launch.app import find_app
from espalier.launch.configuration import configuration
from espalier.launch.presets import preset_files
from server_app.estimate.command import main as planning
from strategies.base.rounds import RunFailed
from tests.bench import ROOT
from tests.federation.tasks.task_runs import bench_of, reviews
from tests.tiny_model import save_tiny_roberta

REMEDY = (
    r"training.base = 'nf4': bitsandbytes is not installed on this machine; install Espalier with"
    r" its extra nf4 \(pip"
)
APP = find_app(str(ROOT))


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without the library, which this process may have imported already."""
    found: Callable[[str], ModuleSpec | None] = {"bitsandbytes": None}.get
    monkeypatch.setattr("espalier.settings.libraries.find_spec", found)


@pytest.mark.usefixtures("missing")
def test_command_refuses_before_any_start() -> None:
    with pytest.raises(EspalierError, match=REMEDY):
        configuration(APP, ["fedpetuning", "training.base=nf4"], on_this_machine=True)


@pytest.mark.usefixtures("missing")
def test_remote_run_is_not_refused_here() -> None:
    _, settings = configuration(APP, ["fedpetuning", "training.base=nf4"], on_this_machine=False)
    assert settings.training.base == "nf4"


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("words", [["fedprllm"], ["fedpetuning", "federation.wire-dtype=nf4"]])
def test_what_does_not_need_it_is_not_refused(words: list[str]) -> None:
    """NF4 as wire dtype is implemented by this program."""
    configuration(APP, words, on_this_machine=True)


@pytest.mark.usefixtures("missing")
def test_server_refuses_before_run_directory(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "sst2", reviews)
    with pytest.raises(EspalierError, match=REMEDY):
        bench.run(training__base="nf4")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("missing")
def test_a_site_says_so_when_it_enrols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site reports it at enrolment, before any site has started to work."""
    bench = bench_of(tmp_path, "sst2", reviews)
    bench.model = save_tiny_roberta(tmp_path / "encoder")
    monkeypatch.setattr("server_app.model_fit.require_libraries", lambda _: None)
    with pytest.raises(RunFailed):
        bench.run(training__base="nf4")
    (folder,) = (tmp_path / "runs").iterdir()
    refused = json.loads((folder / "summary.json").read_text())["refused"]
    assert len(refused) == bench.num_clients
    assert all(
        "bitsandbytes is not installed on this machine" in reason for reason in refused.values()
    )


def in_a_process(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in its own process, with the app's packages and the tests."""
    paths = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", paths + program], capture_output=True, text=True, check=False
    )


def test_a_whole_tuning_run_works_without_it(tmp_path: Path) -> None:
    """A new process shows that peft works without the library as well."""
    program = f"""
import sys
from pathlib import Path
sys.modules["bitsandbytes"] = None
from tests.bench import Bench
settings = {{"federation.rounds": 1, "training.steps": 1, "training.batch-size": 2, \
"evaluation.own-text": False}}
print(Bench(Path({str(tmp_path)!r}), "fedpetuning", settings, num_clients=2).run() / "adapter")
"""
    done = in_a_process(program)
    assert done.returncode == 0, done.stderr
    adapter = Path(done.stdout.splitlines()[-1])
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in adapter.iterdir()
    }


NF4 = {"model": "demo", "fedsoda.emulator": "nf4", "training.base": "nf4"}


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(
    "words", [["fedsoda", "fedsoda.emulator=nf4"], ["fedpetuning", "training.base=nf4"]]
)
def test_a_plan_is_made_on_a_machine_without_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan computes nothing that needs the library."""
    asked: list[str] = []

    def note(_: Path, module: str, __: object) -> int:
        asked.append(module)
        return 0

    monkeypatch.setattr("espalier.cli.app_commands.run_in_app", note)
    assert main(["plan", *words, "--app", str(APP)]) == 0
    assert asked == ["server_app.estimate.command"]


@pytest.mark.parametrize("method", [pytest.param("fedsoda", marks=pytest.mark.slow), "fedpetuning"])
def test_a_plan_says_the_same_without_it(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    flat = {
        key: value
        for key, value in NF4.items()
        if key.partition(".")[0] in ("model", "training", method)
    }
    document = {
        "run": {
            "method": method,
            **flat,
            "fedsoda.groups": 1,
            "fedsoda.group-layers": 1,
            "fedsoda.adapter-layers": 2,
        }
    }
    if method != "fedsoda":
        document["run"] = {"method": method, **flat}
    assert planning(document) == 0
    with_it = capsys.readouterr().out
    program = (
        "import sys\nsys.modules['bitsandbytes'] = None\nfrom server_app.estimate.command import"
        " main\n"
    )
    done = in_a_process(f"{program}sys.exit(main({document!r}))")
    assert done.returncode == 0, done.stderr
    assert done.stdout == with_it


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("preset", preset_files(APP))
def test_no_preset_needs_it(preset: str) -> None:
    """A plain installation can run every preset."""
    configuration(APP, [preset], on_this_machine=True)
