"""Checks of ``espalier run`` before it starts a simulation: it opens everything that is read."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.cli.command import main
from espalier.errors import EspalierError, InputError
from espalier.launch.app import run_in_app as run_in_process
from espalier.launch.run import BEFORE_START
from espalier.progress import Throttle, progress_listener
from server_app import preflight
from server_app.preflight import open_all
from tests.bench import DEFAULTS, flatten, private_text
from tests.tiny_model import save_tiny_llama

APP = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> dict[str, Any]:
    """Return a configuration of three clients with one text each, and an evaluation text."""
    for name in ("0", "1", "2", "public"):
        (tmp_path / f"{name}.txt").write_text(private_text(int(name) if name != "public" else 99))
    return flatten(DEFAULTS) | {
        "model": str(model),
        "num-clients": 3,
        "threads": 1,
        "data.source": "files",
        "data.path": f"{tmp_path}/{{client}}.txt",
        "data.num-samples": 2,
        "data.sequence-length": 16,
        "evaluation.texts": f"documentation,public={tmp_path}/public.txt",
        "evaluation.sequence-length": 16,
    }


def told(config: dict[str, Any]) -> list[str]:
    """Return the messages about clients that the run can do without."""
    lines: list[str] = []
    open_all(config, lines.append)
    return lines


def test_nothing_is_said_where_all_is_well(config: dict[str, Any]) -> None:
    assert told(config) == []


def test_an_epsilon_that_no_noise_keeps_is_refused(config: dict[str, Any]) -> None:
    pytest.importorskip("opacus", reason="needs the extra privacy")
    private = {"method": "pooled-pruning", "privacy.epsilon": 1e-6}
    off = {"evaluation.local-baseline": False, "data.source": "files"}
    with pytest.raises(EspalierError, match=r"privacy\.epsilon = 1e-06: no noise keeps"):
        told(config | private | off)


def test_a_group_in_the_files_of_two_clients_is_refused(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config |= {"data.path": f"{tmp_path}/{{client}}.jsonl", "data.group": "patient"}

    def write(client: int, patients: list[str]) -> None:
        text = private_text(client)
        records = [{"text": text, "patient": patient} for patient in patients]
        (tmp_path / f"{client}.jsonl").write_text("\n".join(map(json.dumps, records)))

    for client in range(3):
        write(client, [f"{client}-{number}" for number in range(20)])
    open_all(config, lambda line: None)
    write(2, [*(f"2-{number}" for number in range(20)), "0-7"])
    words = rf"^data.group = 'patient': {tmp_path}/0.jsonl and {tmp_path}/2.jsonl have records of"
    with pytest.raises(InputError, match=words) as caught:
        open_all(config, lambda line: None)
    assert "0-7" not in str(caught.value)
    # A file that cannot be read costs only its client.
    (tmp_path / "2.jsonl").write_text("{")
    config["quorum"] = 0.6
    lines: list[str] = []
    open_all(config, lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("client 2: ")


def test_every_client_file_mistake_is_told_once(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("hawthorn")
    (tmp_path / "1.txt").unlink()
    (tmp_path / "2.txt").write_text("hawthorn")
    with pytest.raises(EspalierError) as caught:
        open_all(config, lambda line: pytest.fail(line))
    few, missing = str(caught.value).splitlines()
    assert few.startswith(
        "clients 0, 2: data: the client's text gives 0 samples of 16 tokens,"
        " but data.num-samples = 2 are needed"
    )
    assert (
        missing
        == f"client 1: {tmp_path}/1.txt: no such file; check data.path or the node's data-path"
    )


def test_client_beyond_quorum_stops_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "1.txt").unlink()
    (line,) = told(config)
    assert line.startswith(f"client 1: {tmp_path}/1.txt: no such file")
    with pytest.raises(EspalierError, match="no such file"):
        open_all(config | {"quorum": 1.0}, lambda line: pytest.fail(line))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/no/such"}, "there is no such directory"),
        ({"data.sequence-length": 65}, "data.sequence-length = 65: the model has 64 positions"),
        ({"evaluation.texts": "public=/no/such.txt"}, "no such file; check evaluation.texts"),
        ({"method": "fedpetuning", "lora.targets": "attn.z"}, "attn.z"),
        (
            {"method": "fedpetuning", "lora.alpha": 0.01},
            "lora.alpha: alpha / rank is 0.00125",
        ),
        ({"pruning.pattern": "3:7"}, "pruning.pattern = '3:7': "),
        ({"method": "fedspallm", "pruning.pattern": "3:7"}, "pruning.pattern = '3:7': "),
        (
            {"method": "fedspallm", "fedspallm.sampled-layers": 0.1, "num-clients": 1},
            (
                "fedspallm.sampled-layers = 0.1: the clients together prune 1 layer in a round, the"
                " model has 2 (client 0 1)"
            ),
        ),
        (
            {"method": "fedpetuning", "data.path": "/no/such.txt"},
            "clients 0, 1, 2: /no/such.txt: no such file",
        ),
        # The clients' texts are too short for this.
        ({"evaluation.own-text": True, "quorum": 1.0}, "evaluation.own-text"),
    ],
)
def test_later_refusals_are_told_at_once(
    config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(EspalierError, match=re.escape(words)):
        open_all(config | changes, lambda line: pytest.fail(line))


def test_unreachable_dataset_is_asked_for_once(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt takes long, and other clients would fail too."""
    asked: list[int] = []

    def read(settings: Any, node: Any, model: Any, client: int) -> None:
        asked.append(client)
        raise InputError(
            "data.path = 'a/b': the dataset cannot be loaded: ConnectionError: no route"
        )

    monkeypatch.setattr(preflight, "read_client_data", read)
    with pytest.raises(
        EspalierError, match=r"^clients 0, 1, 2: data.path = 'a/b': the dataset cannot be loaded"
    ):
        open_all(
            config | {"data.source": "hub", "data.path": "a/b"}, lambda line: pytest.fail(line)
        )
    assert asked == [0]


def test_unusable_state_directory_is_told(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(EspalierError, match="state-dir"):
        open_all(config, lambda line: pytest.fail(line))


def test_a_model_without_a_tokenizer_is_told(config: dict[str, Any], tmp_path: Path) -> None:
    alone = save_tiny_llama(tmp_path / "local_baseline")
    for file in alone.glob("token*"):
        file.unlink()
    with pytest.raises(EspalierError, match="the tokenizer cannot be loaded"):
        open_all(config | {"model": str(alone)}, lambda line: pytest.fail(line))


@contextmanager
def superlink_that_takes_no_runs() -> Iterator[SimpleNamespace]:
    """SuperLink of the command, which starts while model and data are checked."""
    yield SimpleNamespace(start_run=lambda *_: pytest.fail("a run was submitted"))


def test_command_ends_before_submission(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: Path
) -> None:
    """The test uses the real process of the app and the command's arguments."""
    asked = []

    def run_in_app(app: Path, module: str, document: Any, hear: Callable[[str], None]) -> int:
        asked.append(module)
        return run_in_process(app, module, json.loads(json.dumps(document)), hear)

    monkeypatch.setattr("espalier.launch.run.run_in_app", run_in_app)
    monkeypatch.setattr("espalier.launch.run.own_superlink", superlink_that_takes_no_runs)
    words = [
        f"model={model}",
        "num-clients=2",
        "data.source=files",
        "data.path=/no/such.txt",
        "data.sequence-length=16",
    ]
    assert main(["run", *words, "evaluation.sequence-length=16", "--app", str(APP)]) == 2
    assert asked == [BEFORE_START]
    assert "espalier: clients 0, 1: /no/such.txt: no such file" in capfd.readouterr().err


def test_a_look_that_the_system_ends_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: Path
) -> None:
    """The process of the check is killed by a signal, as if memory is short.

    No run is submitted.
    """
    monkeypatch.setattr("espalier.launch.run.run_in_app", lambda *_: -9)
    monkeypatch.setattr("espalier.launch.run.own_superlink", superlink_that_takes_no_runs)
    assert main(["run", f"model={model}", "--app", str(APP)]) == 1
    assert (
        "espalier: the check of model and data was ended by signal 9; the machine may"
        in capfd.readouterr().err
    )


def test_running_superlink_needs_no_local_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model and data are on other machines."""
    monkeypatch.setattr("espalier.launch.run.run_in_app", lambda *_: pytest.fail("looked"))
    monkeypatch.setattr("espalier.launch.run._run", lambda *_: ("finished:completed", "", ""))
    assert (
        main(
            [
                "run",
                "two-sites",
                "model=/on/the/server",
                "--superlink",
                "127.0.0.1:1",
                "--app",
                str(APP),
            ]
        )
        == 0
    )


def test_progress_of_reading_data_is_shown(config: dict[str, Any]) -> None:
    heard: list[str] = []
    with progress_listener(heard.append):
        assert told(config) == []
    words = {text.split("%")[0] for text in heard}
    assert {
        "reading public.txt: 100",
        *(f"client {client}: reading {client}.txt: 100" for client in range(3)),
    } <= words
    assert any(text.startswith("client 2: encoding samples: 50%") for text in heard)


def test_what_takes_long_is_told(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "server_app.preflight.Throttle", lambda say: Throttle(say, lambda: 0.0, every=0.0)
    )
    assert preflight.main(config) == 0
    assert (
        "espalier: client 1: reading 1.txt: 100%, 0 s left  [0 s]"
        in capsys.readouterr().err.splitlines()
    )


def test_simulation_without_ray_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: Path
) -> None:
    """A container image has no Ray; a run on real sites does not need it."""
    monkeypatch.setattr("espalier.launch.run.find_spec", lambda _: None)
    monkeypatch.setattr("espalier.launch.run.run_in_app", lambda *_: pytest.fail("looked"))
    assert main(["run", f"model={model}", "--app", str(APP)]) == 2
    assert (
        "espalier: Ray is not installed here, and simulated clients need it: `pip install -e .`"
        in capfd.readouterr().err
    )
    monkeypatch.setattr("espalier.launch.run._run", lambda *_: ("finished:completed", "", ""))
    assert main(["run", "two-sites", "--superlink", "127.0.0.1:1", "--app", str(APP)]) == 0
