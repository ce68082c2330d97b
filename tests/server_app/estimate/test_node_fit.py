"""``espalier check-node`` and the memory and disk of a machine: the estimate for this node.

It reports machines that are too small.
"""

from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from espalier.amounts import size as as_size
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from server_app.estimate import node_fit
from server_app.estimate.command import planned
from tests.bench import DEFAULTS, flatten
from tests.tiny_model import save_tiny_llama

GIGA = 10**9


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """A run on a small model."""
    changes = {
        "model": str(save_tiny_llama(tmp_path / "model")),
        "data.num-samples": 2,
        "data.sequence-length": 16,
    }
    return flatten(DEFAULTS) | changes | {"evaluation.sequence-length": 16}


def said(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, total: int, free: int, **node: Any
) -> int:
    """Return the exit status of the command on a machine with this memory."""
    monkeypatch.setattr(node_fit, "machine_memory", lambda: (total, free))
    own = {"site": "hospital-a", "model-path": run["model"]} | node
    return node_fit.main({"node": own, "run": run})


def test_it_is_the_plans_figure(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(run, monkeypatch, 64 * GIGA, 32 * GIGA) == 0
    shown = capsys.readouterr().out
    settings = parse(run)
    peak = planned(settings, open_model(settings.model)).client.peak
    assert f"about {as_size(peak)} of this machine at the peak of the work" in shown
    assert "that is more than" not in shown
    assert "The node can take part in such a run (method fedprllm)." in shown


def test_short_memory_is_told_or_refused(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(run, monkeypatch, 64 * GIGA, GIGA // 10) == 0
    assert "that is more than the 100 MB that are free now" in capsys.readouterr().out
    assert said(run, monkeypatch, GIGA // 10, GIGA // 20) == 2
    shown = capsys.readouterr()
    assert "memory: the work takes about" in shown.err
    assert "there are 100 MB. Choose a larger machine, or a run with smaller batches" in shown.err
    assert "can take part" not in shown.out


def test_model_from_server_is_not_guessed(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(run | {"method": "fedsoda"}, monkeypatch, GIGA, GIGA) == 0
    assert "depends on the model that the run's server sends" in capsys.readouterr().out


def test_hidden_states_on_disk_need_less_memory(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        node_fit,
        "Plan",
        lambda settings, *_, **__: asked.append(settings.activations) or _NoMemory(),
    )
    monkeypatch.setattr(node_fit, "memory_line", lambda memory, on_device: "")
    monkeypatch.setattr(node_fit, "outlook", lambda traffic: None)
    monkeypatch.setattr(node_fit, "sends", lambda *_: ())
    assert said(run, monkeypatch, GIGA, GIGA, activations="disk") == 0
    assert asked == ["disk"]


class _NoMemory:
    traffic = client = None
    model = SimpleNamespace(plan=None)
    client_disk = MappingProxyType[str, int]({})


def on_a_disk_of(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the free bytes of every disk."""
    monkeypatch.setattr(
        "server_app.estimate.node_fit.shutil.disk_usage", lambda _: SimpleNamespace(free=free)
    )


def test_planned_disk_space_must_be_free(
    run: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    where = {"state-dir": str(tmp_path / "not" / "made")}
    plan = planned(settings := parse(run), open_model(settings.model))
    size = as_size(sum(plan.client_disk.values()))
    on_a_disk_of(GIGA, monkeypatch)
    assert said(run, monkeypatch, GIGA, GIGA, **where) == 0
    assert (
        f"disk       about {size} in {tmp_path}/not/made (answers and pushed data"
        in capsys.readouterr().out
    )
    on_a_disk_of(100, monkeypatch)
    assert said(run, monkeypatch, GIGA, GIGA, **where) == 2
    told = capsys.readouterr().err
    assert (
        f"state-dir = '{tmp_path}/not/made': 100 B are free, and the run keeps about {size} there ("
        in told
    )
    assert "free it, or name another directory" in told


def test_a_model_of_its_own_goes_to_another_disk(
    run: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    on_a_disk_of(GIGA, monkeypatch)
    tuned = run | {"method": "fedspine", "lora.targets": "all"}
    assert said(tuned, monkeypatch, GIGA, GIGA, **{"state-dir": str(tmp_path)}) == 0
    assert "its own model" not in capsys.readouterr().out.rpartition("\nmemory ")[2]
    assert (
        said(
            tuned,
            monkeypatch,
            GIGA,
            GIGA,
            **{"state-dir": str(tmp_path), "models-dir": str(tmp_path / "own")},
        )
        == 0
    )
    assert f"in {tmp_path}/own (its own model " in capsys.readouterr().out


def test_models_that_runs_bring_are_there_twice(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_disk_of(GIGA, monkeypatch)
    assert (
        said(run | {"method": "fedsoda"}, monkeypatch, GIGA, GIGA, **{"max-model-bytes": GIGA}) == 2
    )
    assert (
        "the run keeps about 2 GB there (models that runs send, twice while one arrives"
        in capsys.readouterr().err
    )
