"""Reports of runs of every kind of result, made by the real server and clients."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from transformers import AutoModelForCausalLM

import server_app.app
from espalier.messages.message import Header
from espalier.results.finished_run import open_run
from espalier.results.report.command import main
from espalier.results.report.layers import layers_of
from espalier.results.report.usage import snippets_of
from espalier.results.run_status import run_status
from strategies.base.rounds import RunFailed
from tests.bench import EVALUATED, Bench, Home, home

TUNED = {
    "federation.rounds": 2,
    "training.steps": 2,
    "training.batch-size": 2,
    "lora.rank": 2,
}


class Page(HTMLParser):
    """Elements and text of a page; a start tag without its end is a fault."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))


def bench_of(folder: Path, shared: Home, method: str, **settings: Any) -> Bench:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
    tuned = TUNED if method in ("fedpetuning", "sft-p") else {}
    return Bench(folder, method, tuned | given, num_clients=2, home=shared)


def page_of(folder: Path) -> Page:
    """Return the page that the command writes, which must need nothing from outside."""
    assert main({"directories": [str(folder)], "out": None, "measure": False, "base": None}) == 0
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert len(page.ids()) == len(set(page.ids()))
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]
    targets = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("href", "src", "xlink:href")
    ]
    # Heat maps hold their pixels themselves.
    inner = [str(target) for target in targets if not str(target).startswith("data:image/png;")]
    assert all(target.startswith("#") for target in inner)
    assert "url(http" not in text
    # Each reference within a figure has its target.
    named = re.findall(r"url\(#([^)]*)\)", text) + [target[1:] for target in inner]
    assert set(named) <= set(page.ids())
    return page


def used(folder: Path) -> dict[str, Any]:
    """Execute the lines that load the result, and return their names."""
    first = snippets_of(open_run(folder))[0]
    names: dict[str, Any] = {}
    exec(first.text, names)
    return names


def test_masks_are_shown(tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 3)
    folder = Bench(tmp_path, "fedprllm", EVALUATED, num_clients=2, home=shared).run()
    run = open_run(folder)
    page = page_of(folder)
    assert "Zeros make a model neither smaller nor faster." in page.text
    assert {"quality", "clients", "bytes", "layers", "egress", "use", "settings"} <= set(page.ids())
    assert "rounds" not in page.ids()
    (heat,) = layers_of(run).maps
    assert heat.columns == ["q", "k", "v", "o", "gate", "up", "down"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for block, layer in enumerate(model.model.layers):
        matrices = {
            name.split(".")[-2].removesuffix("_proj"): weight
            for name, weight in layer.named_parameters()
            if weight.dim() == 2
        }
        for name, value in zip(heat.columns, heat.rows[block], strict=True):
            assert value == pytest.approx(float((matrices[name] == 0).double().mean()), abs=1e-9)
    assert page.text.count("log is intact") == len(run.summary["clients"])


def test_cut_model_is_shown(tmp_path: Path, shared: Home) -> None:
    folder = bench_of(tmp_path, shared, "flap", pruning__ratio=0.4).run()
    page = page_of(folder)
    units = open_run(folder).summary["report"]["groups_of_blocks"]
    (heat,) = layers_of(open_run(folder)).maps
    config = AutoModelForCausalLM.from_pretrained(shared.model).config
    assert [tuple(row) for row in heat.rows.values()] == [
        (own["groups"] / config.num_key_value_heads, own["channels"] / config.intermediate_size)
        for own in units
    ]
    assert "fewer than its base" in page.text
    assert "trust_remote_code=True" in page.text


@pytest.mark.parametrize("form", ["plain", "zero-filled"])
def test_cut_model_without_its_structure_is_compared_with_its_base(
    tmp_path: Path, shared: Home, form: str
) -> None:
    folder = bench_of(
        tmp_path, shared, "flap", pruning__form=form, pruning__selection="kind",
        flap__bias_compensation=False, pruning__ratio=0.4,
    ).run()  # fmt: skip
    assert not (folder / "model" / "structure.json").exists()
    (heat,) = layers_of(open_run(folder)).maps
    assert all(value is not None and value < 1 for row in heat.rows.values() for value in row)
    assert "trust_remote_code" not in page_of(folder).text


def test_adapter_and_rounds_are_shown(tmp_path: Path, shared: Home) -> None:
    folder = bench_of(tmp_path, shared, "fedpetuning", evaluation__every=1).run()
    page = page_of(folder)
    assert "The adapter adds" in page.text
    assert {"rounds", "layers"} <= set(page.ids())
    model = used(folder)["model"]
    (heat,) = layers_of(open_run(folder)).maps
    for block, row in heat.rows.items():
        attention = model.base_model.model.model.layers[block].self_attn
        for name, value in zip(heat.columns, row, strict=True):
            module = getattr(attention, f"{name}_proj")
            update = module.lora_B["default"].weight @ module.lora_A["default"].weight
            assert value == pytest.approx(float(torch.linalg.norm(update)), rel=1e-5, abs=1e-9)


def test_personal_models_are_shown(tmp_path: Path, shared: Home) -> None:
    folder = bench_of(
        tmp_path, shared, "sft-p", pruning__ratio=0.4, sft_p__embedding=8, sft_p__code=4
    ).run()
    run = open_run(folder)
    names = list(run.client_models)
    assert len(names) == 2
    page = page_of(folder)
    assert "mean of the clients' models" in page.text
    maps = layers_of(run).maps
    kept = [one for one in maps if one.title.startswith("Kept")]
    assert [one.columns for one in kept] == [names] * 4
    # The norm of the adapter's updates is a map of its own.
    assert len(maps) == 5


def test_failed_run_is_shown(tmp_path: Path, shared: Home) -> None:
    bench = bench_of(tmp_path, shared, "flap")
    (tmp_path / "text-1.txt").write_text("too short")
    context = Context(7, 0, {}, RecordDict(), bench.config(quorum=1.0))
    with pytest.raises(RunFailed):
        server_app.app.run_method(bench.grid(), context, bench.time.clock(), report=True)
    (folder,) = bench.runs()
    page = Page((folder / "report.html").read_text())
    assert "The run failed: RunFailed" in page.text
    assert "has written no model and no adapter" in " ".join(page.text.split())


def test_server_writes_report_of_a_completed_run(
    tmp_path: Path, shared: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = bench_of(tmp_path, shared, "fedprllm")
    context = Context(7, 0, {}, RecordDict(), bench.config())
    folder = server_app.app.run_method(bench.grid(), context, bench.time.clock(), report=True)
    assert f"the report is in {folder / 'report.html'}" in capsys.readouterr().out
    assert "completed" in Page((folder / "report.html").read_text()).text


def test_report_that_cannot_be_made_does_not_fail_a_run(
    tmp_path: Path,
    shared: Home,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(server_app.app, "write_report", fail)
    bench = bench_of(tmp_path, shared, "fedprllm")
    context = Context(7, 0, {}, RecordDict(), bench.config())
    folder = server_app.app.run_method(bench.grid(), context, bench.time.clock(), report=True)
    assert open_run(folder).summary["status"] == "completed"
    assert "no report could be written (ZeroDivisionError: no)" in capsys.readouterr().out


def test_interrupted_run_is_shown(tmp_path: Path, shared: Home) -> None:
    bench = bench_of(tmp_path, shared, "fedpetuning")

    def second_round(header: Header) -> bool:
        return header.kind == "train" and header.server_round == 2

    folder = bench.killed(second_round)
    summary = (folder / "summary.json").read_text()
    # A server that is killed cannot say that it ended.
    (folder / "summary.json").write_text(summary.replace('"failed"', '"running"'))
    assert run_status(folder)[0] == "interrupted"
    assert f"resume-from={folder}" in page_of(folder).text
