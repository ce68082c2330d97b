"""Exports of made runs: plain transformers and peft load them, and bad requests are refused."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from espalier.api import load_result
from espalier.environment.hub_models import download_model
from espalier.errors import InputError
from espalier.hf.export.model import export_edited
from espalier.hf.opening.opened_model import OpenedModel
from espalier.results.base_chain import chain_of
from espalier.results.export import command
from espalier.results.export.card import datasets_of
from espalier.results.finished_run import open_run
from espalier.results.sources import Source
from espalier.results.use.scores import Score, store
from tests.hf.hub_server import TOKEN, Hub, serving
from tests.results.made_runs import masked_run, pruned_run, tuned_run
from tests.tiny_model import save_tiny_llama

SAMPLES = torch.arange(2 * 9).view(2, 9)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "base", dtype=torch.float32)


def export(source: Path, to: str, out: Path, **changes: Any) -> int:
    document = {
        "source": str(source), "to": to, "out": str(out), "adapter": False, "client": "",
        "base": None, "dtype": "", "repository": "", "private": False, "license": "",
    }  # fmt: skip
    return command.main(document | changes)


@torch.no_grad()
def logits(folder: Path, **changes: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)
    found: torch.Tensor = model.eval()(input_ids=SAMPLES).logits
    return found


def test_chain_of_two_runs_is_rebuilt(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model that run A pruned, with the adapter of run B."""
    first = pruned_run(tmp_path / "runs" / "a", base)
    second, edits = tuned_run(tmp_path / "runs" / "b", str(first))
    assert export(second, "transformers", tmp_path / "out") == 0
    export_edited(OpenedModel(first / "model"), edits, tmp_path / "expected")
    for name in ("model.safetensors", "config.json", "structure.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Made from `base` (SHA-256 `" in card
    assert ", then `flap` in run `a` (SHA-256 `" in card
    assert 'from_pretrained("this directory", trust_remote_code=True)' in card
    assert str(tmp_path) not in card
    assert export(second, "transformers", tmp_path / "adapter", adapter=True) == 0
    line = f'AutoPeftModelForCausalLM.from_pretrained("{tmp_path}/adapter", trust_remote_code=True)'
    assert line in capsys.readouterr().out


def test_an_export_continues_the_chain_of_its_run(base: Path, tmp_path: Path) -> None:
    first = pruned_run(tmp_path / "runs" / "a", base)
    second, _ = tuned_run(tmp_path / "runs" / "b", str(first))
    assert export(second, "transformers", tmp_path / "out") == 0
    links = chain_of(OpenedModel(tmp_path / "out"))
    assert [(link.run, link.method) for link in links[:2]] == [
        ("b", "fedpetuning"), ("a", "flap"),
    ]  # fmt: skip
    assert links[2].sha256 == OpenedModel(base).sha256
    assert str(tmp_path) not in (tmp_path / "out" / "espalier.json").read_text()
    weights = tmp_path / "out" / "model.safetensors"
    tensors = {name: value * 2 for name, value in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    assert len(chain_of(OpenedModel(tmp_path / "out"))) == 1


def test_runs_that_moved_together_are_exported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = pruned_run(tmp_path / "runs" / "a", base)
    tuned_run(tmp_path / "runs" / "b", str(first))
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "b"
    assert export(moved, "transformers", tmp_path / "out") == 0
    (tmp_path / "elsewhere" / "a").rename(tmp_path / "copy")
    assert export(moved, "transformers", tmp_path / "second") == 2
    assert "its base model cannot be opened" in (told := capsys.readouterr().err)
    assert "--base (in Python: base=) names a copy of it" in told
    copy = str(tmp_path / "copy" / "model")
    assert export(moved, "transformers", tmp_path / "second", base=copy) == 0
    names = ("model.safetensors", "config.json")
    one, other = (
        [(tmp_path / place / name).read_bytes() for name in names] for place in ("out", "second")
    )
    assert one == other
    assert export(moved, "transformers", tmp_path / "third", base=str(base)) == 2
    assert "does not have the hash that b recorded" in capsys.readouterr().err


def test_card_of_a_clients_model_has_its_own_scores(base: Path, tmp_path: Path) -> None:
    first = pruned_run(tmp_path / "runs" / "a", base)
    (first / "clients").mkdir()
    (first / "model").rename(first / "clients" / "clinic-b")
    summary = json.loads((first / "summary.json").read_text())
    summary["clients"] = [
        {"client": number, "site": site, "metrics": {"perplexity/documentation/federated": value}}
        for number, (site, value) in enumerate([("clinic-a", 11.5), ("clinic-b", 15.0)])
    ]
    (first / "summary.json").write_text(json.dumps(summary))
    assert export(first, "transformers", tmp_path / "out", client="clinic-b") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| perplexity on documentation (lower is better) | 12.5 | 15 |" in card
    assert "value: 15.0" in card
    assert "13.25" not in card


def test_scores_on_local_files_are_not_in_the_model_index(base: Path, tmp_path: Path) -> None:
    run, _ = tuned_run(tmp_path / "runs" / "b", str(base))
    score = Score("result", "arc_easy", "acc", 0.5, None, 6, 0)
    store(open_run(run), [score, replace(score, value=0.25, data_sha256="ab" * 32)], "0.4", None)
    assert export(run, "transformers", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- arc_easy, acc: 0.5000" in card
    assert "- arc_easy, local file abababab, acc: 0.2500" in card
    assert "value: 0.5" in card
    assert "value: 0.25" not in card


@pytest.mark.parametrize(("named", "expected"), [("", "aps/super_glue"), ("o/texts", "o/texts")])
def test_a_task_has_its_own_dataset(base: Path, tmp_path: Path, named: str, expected: str) -> None:
    run, _ = tuned_run(tmp_path / "runs" / "b", str(base))
    settings = tomllib.loads((run / "settings.toml").read_text())
    changed = {"data": {"source": "hub", "path": named}, "task": {"name": "boolq"}}
    (run / "settings.toml").write_text(tomli_w.dumps(settings | changed))
    assert datasets_of(Source("result", base, run=open_run(run))) == [expected]


def test_blocks_of_equal_widths_need_no_code(base: Path, tmp_path: Path) -> None:
    run = pruned_run(tmp_path / "runs" / "a", base, even=True)
    assert export(run, "transformers", tmp_path / "out") == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert not names & {"structure.json", "modeling_structured.py"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["intermediate_size"]) == ("llama", 8)
    expected = logits(run / "model", trust_remote_code=True)
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)


def test_changed_modelling_code_is_not_passed_on(base: Path, tmp_path: Path) -> None:
    run = pruned_run(tmp_path / "runs" / "a", base)
    code = (run / "model" / "modeling_structured.py").read_bytes()
    (run / "model" / "modeling_structured.py").write_text("raise SystemExit\n")
    assert export(run, "transformers", tmp_path / "out") == 0
    assert (tmp_path / "out" / "modeling_structured.py").read_bytes() == code


def test_damaged_adapter_is_told(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = tuned_run(tmp_path / "runs" / "b", str(base))
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    assert export(run, "transformers", tmp_path / "out") == 2
    assert "adapter_model.safetensors: cannot be read" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"adapter: cannot be loaded .*; check the run directory"):
        load_result(run).model()


def test_gguf_of_model_and_adapter(base: Path, tmp_path: Path) -> None:
    run, _ = tuned_run(tmp_path / "runs" / "b", str(base))
    assert export(run, "gguf", tmp_path / "whole") == 0
    assert export(run, "gguf", tmp_path / "part", adapter=True) == 0
    assert export(base, "gguf", tmp_path / "dense", dtype="float16") == 0
    assert [file.name for file in (tmp_path / "whole").iterdir()] == ["model.gguf"]
    assert [file.name for file in (tmp_path / "part").iterdir()] == ["adapter.gguf"]
    assert (tmp_path / "dense" / "model.gguf").stat().st_size < (
        tmp_path / "whole" / "model.gguf"
    ).stat().st_size


@pytest.mark.parametrize(
    ("to", "adapter"), [("transformers", False), ("transformers", True), ("gguf", False)]
)
def test_a_place_that_cannot_be_written(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, *, adapter: bool
) -> None:
    run, _ = tuned_run(tmp_path / "runs" / "b", str(base))
    (tmp_path / "file").touch()
    assert export(run, to, tmp_path / "file" / "out", adapter=adapter) == 2
    assert "file/out: Not a directory; choose another directory" in capsys.readouterr().err
    assert export(run, to, tmp_path / ("o" * 300), adapter=adapter) == 2
    assert "File name too long; name a new directory" in capsys.readouterr().err


def test_bad_requests(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned, _ = tuned_run(tmp_path / "runs" / "b", str(base))
    masked = masked_run(tmp_path / "runs" / "m", base)
    out = tmp_path / "out"

    def told(source: Path, **changes: Any) -> str:
        assert export(source, "transformers", out, **changes) == 2
        assert not out.exists()
        return " ".join(capsys.readouterr().err.split())

    assert "is not a run directory" in told(tmp_path)
    assert "is a model directory; --adapter, --client and --base need a run" in told(
        base, adapter=True
    )
    assert "has no adapter/; take the model of the run: leave out --adapter" in told(
        masked, adapter=True
    )
    assert "is a whole model; leave it out" in told(masked, base=str(base))
    assert "has no model of client 'c'; it has no models of single" in told(masked, client="c")
    assert "--dtype: does not apply to --to transformers" in told(masked, dtype="float16")
    assert "--private: does not apply to --to transformers" in told(masked, private=True)
    assert "--client: does not apply to --adapter" in told(tuned, adapter=True, client="c")
    assert export(masked, "transformers", tmp_path / "runs") == 2
    assert "is there already; name a new directory" in capsys.readouterr().err
    shutil.copy(tmp_path / "runs" / "b" / "summary.json", tmp_path / "kept.json")
    summary = json.loads((tmp_path / "kept.json").read_text())
    (tuned / "summary.json").write_text(json.dumps(summary | {"status": "failed"}))
    assert "the run is failed; only results of completed runs are exported" in told(tuned)
    shutil.copy(tmp_path / "kept.json", tuned / "summary.json")
    save_tiny_llama(base, seed=1)
    assert "does not have the hash that b recorded for its base model" in told(tuned)


# ----- the hub -----


@pytest.fixture
def hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with serving(base, tmp_path / "cache", monkeypatch) as found:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", found.url)
        yield found


def test_upload(base: Path, tmp_path: Path, hub: Hub) -> None:
    download_model("ward/tiny")
    run, _ = tuned_run(tmp_path / "runs" / "b", "ward/tiny")
    words: dict[str, Any] = {"repository": "ward/tuned", "private": True}
    assert export(run, "hub", tmp_path / "out", adapter=True, **words) == 0
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("tuned", "ward")
    # huggingface_hub 1 and 2 write it differently.
    assert created.get("visibility") == "private" or created.get("private") is True
    assert {name.removeprefix("ward/tuned/") for name in hub.uploaded} == {
        file.name for file in (tmp_path / "out").iterdir()
    }
    card = ModelCard(hub.uploaded["ward/tuned/README.md"].decode())
    assert (card.data.base_model, card.data.base_model_relation) == ("ward/tiny", "adapter")
    assert (card.data.license, card.data.datasets) == ("apache-2.0", ["o/texts"])
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("perplexity", 13.25)
    assert 'AutoPeftModelForCausalLM.from_pretrained("ward/tuned")' in card.content
    for content in hub.uploaded.values():
        assert str(tmp_path).encode() not in content


def test_uploads_that_are_refused(
    base: Path,
    tmp_path: Path,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local, _ = tuned_run(tmp_path / "runs" / "b", str(base))

    def told(**changes: Any) -> str:
        words = {"repository": "ward/tuned", "license": "mit"} | changes
        assert export(local, "hub", tmp_path / "out", **words) == 2
        assert not hub.uploaded
        return " ".join(capsys.readouterr().err.split())

    assert "must be OWNER/NAME" in told(repository="tuned")
    assert "--to hub: needs --repository OWNER/NAME" in told(repository="")
    assert "leave out --adapter to upload the merged model" in told(adapter=True)
    assert "the licence of the base model is not known; name it" in told(license="")
    monkeypatch.setenv("HF_TOKEN", "hf_of-somebody")
    assert "the upload failed" in told()
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    requests = hub.requests
    assert "HF_HUB_OFFLINE is set, so nothing is sent" in told()
    assert hub.requests == requests


def test_licence_of_the_base_is_taken_from_its_card(base: Path, tmp_path: Path, hub: Hub) -> None:
    run = masked_run(tmp_path / "runs" / "m", base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert export(run, "hub", tmp_path / "out", repository="ward/small") == 0
    card = ModelCard(hub.uploaded["ward/small/README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert "base_model" not in card.data.to_dict()
    assert "a: b" not in card.content


def test_results_take_the_place_of_the_sentence_about_the_summary(
    base: Path, tmp_path: Path
) -> None:
    run = masked_run(tmp_path / "runs" / "m", base)
    sentence = "The run's `summary.json` compares it with the base model.\n"
    (run / "model" / "README.md").write_text(f"# small\n\nThe licence also applies.\n{sentence}")
    assert export(run, "transformers", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The licence also applies." in card
    assert "## Results" in card
    assert sentence not in card
