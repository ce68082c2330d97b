"""``espalier check-node`` beside memory: the plan's figure for this node, and a machine on which it does not fit."""

from pathlib import Path
from typing import Any

import pytest
from bench import DEFAULTS, flatten
from tiny_model import save_tiny_llama

from espalier.settings.run import parse
from server_app.planning import client_memory
from server_app.planning.command import planned
from server_app.planning.plan import as_size

GIGA = 10**9


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """A run on a small model."""
    changes = {"model": str(save_tiny_llama(tmp_path / "model")), "data.windows": 2, "data.window-tokens": 16}
    return flatten(DEFAULTS) | changes | {"evaluation.window-tokens": 16}


def said(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, total: int, free: int, **node: str) -> int:
    """What the command comes to on a machine with so much memory."""
    monkeypatch.setattr(client_memory, "machine_memory", lambda: (total, free))
    own = {"site": "hospital-a", "model-path": run["model"]} | node
    return client_memory.main({"node": own, "run": run})


def test_it_is_the_plans_figure(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(run, monkeypatch, 64 * GIGA, 32 * GIGA) == 0
    shown = capsys.readouterr().out
    settings = parse(run)
    peak = planned(settings, client_memory.open_model(settings.model)).client.peak
    assert f"about {as_size(peak)} of this machine at the peak of the work" in shown
    assert "that is more than" not in shown
    assert "The node can take part in such a run (method fedprllm)." in shown


def test_what_is_not_free_now_is_told_and_what_is_not_there_is_refused(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(run, monkeypatch, 64 * GIGA, GIGA // 10) == 0
    assert "that is more than the 100 MB that are free now" in capsys.readouterr().out
    assert said(run, monkeypatch, GIGA // 10, GIGA // 20) == 2
    shown = capsys.readouterr()
    assert "memory: the work takes about" in shown.err
    assert "there are 100 MB. Choose a larger machine, or a run with smaller batches" in shown.err
    assert "can take part" not in shown.out


def test_a_model_that_the_server_brings_is_not_guessed(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(run | {"method": "fedsoda"}, monkeypatch, GIGA, GIGA) == 0
    assert "the model that the run's server brings decides" in capsys.readouterr().out


def test_hidden_states_that_the_node_keeps_on_disk_take_less(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(client_memory, "Plan", lambda settings, *_, **__: asked.append(settings.activations) or _NoMemory())
    monkeypatch.setattr(client_memory, "told", lambda memory, on_device: "")
    assert said(run, monkeypatch, GIGA, GIGA, activations="disk") == 0
    assert asked == ["disk"]


class _NoMemory:
    client = None
