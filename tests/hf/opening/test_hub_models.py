"""Models of the Hugging Face hub by name, downloaded from a hub on this machine."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session
from transformers import AutoModelForCausalLM

from espalier.environment.hub_models import cached_model, download_model
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.launch.configuration import configuration
from espalier.launch.run import WatchedRun, _require_inputs
from espalier.settings.run import parse
from server_app import preflight
from server_app.estimate.command import main as plan
from strategies.base.model_of_hub import with_downloaded_model
from tests.hf.hub_server import COMMIT, TOKEN, Hub, serving
from tests.tiny_model import WORDS, save_tiny_llama

APP = Path(__file__).parents[3]
PINNED = f"ward/tiny@{COMMIT}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Hub with a model, and files of other formats beside it."""
    folder = save_tiny_llama(tmp_path / "repository")
    others = ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors", "a.gguf")
    for name in (*others, "README.md", "LICENSE", "training_args.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    with serving(folder, tmp_path / "cache", monkeypatch) as found:
        yield found


def test_only_files_that_are_read_are_downloaded(hub: Hub) -> None:
    assert download_model("ward/tiny") == PINNED
    assert sorted(hub.sent) == [
        "LICENSE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    model = open_model("ward/tiny")
    assert model.sha256 == OpenedModel(hub.folder).sha256
    AutoModelForCausalLM.from_pretrained(model.directory)
    hub.sent.clear()
    assert download_model(PINNED) == PINNED
    assert not hub.sent


def test_shards_of_index_are_downloaded(hub: Hub) -> None:
    whole = AutoModelForCausalLM.from_pretrained(hub.folder)
    (hub.folder / "model.safetensors").unlink()
    whole.save_pretrained(hub.folder, max_shard_size="10KB")
    shards = {path.name for path in hub.folder.glob("model-*-of-*.safetensors")}
    assert len(shards) > 1
    download_model("ward/tiny")
    assert {name for name in hub.sent if name.endswith(".safetensors")} == shards
    assert open_model("ward/tiny").sha256 == OpenedModel(hub.folder).sha256


def test_existing_directory_wins(hub: Hub, tmp_path: Path) -> None:
    shutil.copytree(hub.folder, tmp_path / "ward" / "tiny")
    assert open_model("ward/tiny").directory == tmp_path / "ward" / "tiny"
    config, _ = configuration(APP, ["model=ward/tiny"], on_this_machine=True)
    assert config["model"] == str(tmp_path / "ward" / "tiny")
    assert not hub.requests


def test_mistyped_run_is_no_model_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "runs" / "20260101-flap-1").mkdir(parents=True)
    (tmp_path / "runs" / "20260101-flap-1" / "summary.json").write_text("{}")
    with pytest.raises(EspalierError, match=r"runs/RUN") as told:
        open_model("runs/RUN")
    assert "hub" not in str(told.value)
    assert not hub.sent


def test_a_command_pins_the_commit(hub: Hub) -> None:
    config, settings = configuration(APP, ["model=ward/tiny"], on_this_machine=True)
    assert config["model"] == settings.model == PINNED
    hub.commit = "d" * 40
    assert cached_model(PINNED).name == COMMIT
    assert download_model("ward/tiny") == f"ward/tiny@{hub.commit}"
    # A SuperLink is elsewhere, and its server downloads the model itself.
    config, _ = configuration(APP, ["model=ward/tiny"], on_this_machine=False)
    assert config["model"] == "ward/tiny"


def test_a_plan_downloads_no_weights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=ward/tiny", "data.sequence-length=16", "evaluation.sequence-length=16"]
    config, _ = configuration(APP, words, on_this_machine=True, works=False)
    assert plan({"run": config}) == 0, capsys.readouterr().err
    assert "config.json" in hub.sent
    assert not [name for name in hub.sent if name.endswith(".safetensors")]


def checked_here(
    app: Path, module: str, document: dict[str, Any], take: Callable[[str], None]
) -> int:
    """Check the inputs of a run in this process, which knows the hub of the test."""
    assert module == preflight.__name__
    with redirect_stderr(StringIO()) as said:
        code = preflight.main(document)
    for line in said.getvalue().splitlines(keepends=True):
        take(line)
    return code


def run_here(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start a run as ``espalier run`` does, until the simulation would begin; return its lines."""
    monkeypatch.setattr("espalier.launch.run.run_in_app", checked_here)
    given = SHORT | words
    config, _ = configuration(
        APP, [f"{key}={value}" for key, value in given.items()], on_this_machine=True
    )
    lines: list[str] = []
    _require_inputs(WatchedRun("", str, lines.append), APP, config)
    return lines


SHORT = {
    "model": "ward/tiny", "num-clients": 2, "data.num-samples": 1, "data.sequence-length": 16,
    "evaluation.sequence-length": 16,
}  # fmt: skip


def test_weights_are_downloaded_after_all_checks(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.txt").write_text("\n\n".join(f"{word} " * 40 for word in WORDS))
    lines = run_here({"data.path": "own.txt"}, monkeypatch)
    assert "model.safetensors" in hub.sent
    assert lines.index(f"downloading the weights of {PINNED}\n") == 1


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        ({}, {"data.path": "none.txt"}, "none.txt: no such file"),
        ({"model_type": "falcon"}, {}, f"{PINNED}/config.json: model_type = 'falcon' is not"),
        ({"num_experts": 4}, {}, f"{PINNED}/config.json: num_experts = 4; mixture-of"),
        ({}, {"data.sequence-length": 999}, "data.sequence-length = 999: the model has"),
    ],
)
def test_no_weights_are_downloaded_for_a_run_that_cannot_be(
    hub: Hub,
    change: dict[str, Any],
    words: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = hub.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EspalierError, match=re.escape(told)):
        run_here(words, monkeypatch)
    assert "config.json" in hub.sent
    assert not [name for name in hub.sent if name.endswith(".safetensors")]


def test_a_server_checks_the_method_before_the_weights(hub: Hub) -> None:
    path = hub.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "falcon"}))
    settings = parse({"method": "flap", "model": "ward/tiny"})
    with pytest.raises(EspalierError, match="model_type = 'falcon' is not supported"):
        with_downloaded_model(settings)
    assert not [name for name in hub.sent if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ward/none", r"does not exist, or is private; correct the name, or set HF_TOKEN"),
        ("ward/tiny@v9", r"has no revision 'v9'; name a branch, a tag or a commit"),
        (f"ward/tiny@{'e' * 40}", r"has no revision 'e+'"),
    ],
)
def test_missing_repository_or_revision_is_a_mistake(hub: Hub, name: str, told: str) -> None:
    start = f"model = '{name}': there is no such directory, and the model on the Hugging Face hub"
    with pytest.raises(EspalierError, match=f"^{start} .*{told}"):
        configuration(APP, [f"model={name}"], on_this_machine=True)
    with pytest.raises(EspalierError, match="has no copy of such a model; download it"):
        open_model(name)


def test_gated_model_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = True
    with pytest.raises(EspalierError, match=r"is gated; accept its terms at .*, and set HF_TOKEN"):
        download_model("ward/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert download_model("ward/tiny") == PINNED


def test_model_without_safetensors_is_a_mistake(hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(EspalierError, match=r"has neither model.safetensors nor .* in safetensors"):
        download_model("ward/tiny")
    assert "pytorch_model.bin" not in hub.sent


@pytest.mark.parametrize("offline", [True, False])
def test_without_network_a_copy_is_needed(
    hub: Hub, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant, value = ("HF_HUB_OFFLINE", True) if offline else ("ENDPOINT", "http://127.0.0.1:9")
    # huggingface_hub 1 names the error of the connection in its log only.
    told = (
        "HF_HUB_OFFLINE is set; unset it"
        if offline
        else "(ConnectError|check your internet connection).*try again when the hub"
    )
    monkeypatch.setattr(f"huggingface_hub.constants.{constant}", value)
    close_session()
    with pytest.raises(EspalierError, match=told):
        download_model("ward/tiny")
    monkeypatch.undo()
    close_session()


def test_prepared_cache_is_enough_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "hub" / "models--ward--tiny"
    save_tiny_llama(kept / "snapshots" / COMMIT)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()
    assert download_model("ward/tiny") == PINNED
    assert cached_model(PINNED) == open_model("ward/tiny").directory
    close_session()


def test_revision_cannot_leave_the_cache(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match=r"there is no such directory"):
        open_model("ward/tiny@../../../secret")
