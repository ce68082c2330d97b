"""Progress of long work.

Simulated clients report to the server, sites to their node's log. The server reports its own work.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

import client_app.methods.pruning.fedprllm
from espalier.launch.run_view import RunView
from espalier.messages.records import read
from espalier.progress import Throttle
from espalier.storage.activity import AtWork
from tests.bench import EVALUATED, Bench, events
from tests.in_process import InProcessGrid

METHODS: dict[str, dict[str, Any]] = {
    "fedpetuning": {
        "federation.rounds": 1,
        "training.steps": 3,
        "training.batch-size": 2,
        "lora.rank": 2,
        "lora.merge": True,
    },
    "fedprllm": {},
    "fedprllm iterative": {"pruning.strategy": "iterative"},
    "fedspallm": {},
    "pooled-pruning": {"pruning.strategy": "iterative"},
}
AT_EVALUATION = {"passing block 1 of 2", "passing block 2 of 2", "scoring"}
AT_THE_SERVER = ("passing block 2 of 2", "scoring", "writing tensor", "checking tensor")
SAID: dict[str, dict[str, set[str]]] = {
    "fedpetuning": {
        "train": {"loading module", "training step 1 of 3", "training step 3 of 3"},
        "local_baseline": {"training step 1 of 3", "training step 3 of 3"},
        "evaluate": AT_EVALUATION,
        "server": {"training step 6 of 6", *AT_THE_SERVER},
    },
    "fedprllm": {
        "train": {"pruning block 1 of 2", "pruning block 2 of 2"},
        "evaluate": AT_EVALUATION,
        "server": {"pruning block 2 of 2", *AT_THE_SERVER},
    },
    "fedprllm iterative": {
        "train": {"pruning block 1 of 2", "passing block 1 of 2", "pruning block 2 of 2"},
        "local_baseline": {"pruning block 1 of 2", "pruning block 2 of 2"},
        "evaluate": AT_EVALUATION,
        "server": {"pruning block 2 of 2", *AT_THE_SERVER},
    },
    "fedspallm": {
        "train": {"pruning block 1 of 2", "pruning block 2 of 2"},
        "evaluate": AT_EVALUATION,
        "server": {"pruning block 2 of 2", *AT_THE_SERVER},
    },
    "pooled-pruning": {
        "train": {"watching block 1 of 2", "passing block 1 of 2", "watching block 2 of 2"},
        "local_baseline": {"pruning block 1 of 2", "pruning block 2 of 2"},
        "evaluate": AT_EVALUATION,
        "server": {"pruning block 2 of 2", *AT_THE_SERVER},
    },
}
"""Some of the progress texts of each message kind and of the server."""


@pytest.fixture
def every_progress_text_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print every progress report, even if it follows the last one at once."""
    for module in ("client_app.protocol.answer_once", "strategies.base.progress"):
        monkeypatch.setattr(
            f"{module}.Throttle", lambda say, now=lambda: 0.0, every=0.0: Throttle(say, now, 0.0)
        )


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    name = getattr(request, "param", "fedprllm")
    more = EVALUATED | {"evaluation.own-text": False, "part-bytes": 1 << 20}
    return Bench(tmp_path, name.split()[0], METHODS[name] | more, num_clients=2)


def a_reply_at_a_time(grid: InProcessGrid) -> InProcessGrid:
    """Delay replies a little after the work, as in a real run.

    The server then has time to read the progress.
    """
    grid.held = {0: 2, 1: 4}
    return grid


def with_its_numbers_left_out(line: str) -> set[str]:
    """Return a line's text with and without its numbers."""
    return {line, re.split(r"[ ,]*\d", line)[0]}


@pytest.mark.usefixtures("every_progress_text_is_a_line")
@pytest.mark.parametrize(
    ("bench", "name"), [(name, name) for name in sorted(METHODS)], indirect=["bench"]
)
def test_every_block_and_step_is_reported(bench: Bench, name: str) -> None:
    grid = a_reply_at_a_time(bench.grid())
    for context in grid.contexts.values():
        # Each client loads the model for each message.
        context.node_config["keep-model"] = False
    folder = bench.run(grid)
    told = events(folder)
    lines = [event["text"] for event in told if event["event"] == "at_work"]
    for kind, expected in SAID[name].items():
        if kind == "server":
            found = [
                re.fullmatch(r".{12} (.*)  \[\d+ s\]", event["text"])
                for event in told
                if event["event"] == "progress"
            ]
            assert expected <= {
                words for match in found if match for words in with_its_numbers_left_out(match[1])
            }
            continue
        for site in ("node-00000", "node-00001"):
            found = [re.fullmatch(rf"{site} + {kind}: (.*)  \[\d+ s\]", line) for line in lines]
            assert expected <= {
                words for match in found if match for words in with_its_numbers_left_out(match[1])
            }, kind


@pytest.mark.usefixtures("every_progress_text_is_a_line")
def test_progress_lines_stay_in_node_s_log(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    grid = a_reply_at_a_time(bench.grid())
    grid.simulated = False
    for client, context in enumerate(grid.contexts.values()):
        own = {"site": f"site-{client}", "model-path": str(bench.model), "min-tokens": 1}
        context.node_config |= own | {"partition-id": -1, "num-partitions": 0}
        grid.held[-1] = 2
    folder = bench.run(grid)
    log = capfd.readouterr().err
    assert re.search(r"^site-1 +train: pruning block 2 of 2  \[0 s\]$", log, re.MULTILINE)
    assert not [event for event in events(folder) if event["event"] == "at_work"]
    assert not list((bench.folder / "state" / "at-work").glob("*"))
    for _, reply in grid.received:
        assert "pruning block" not in str(reply.content)


def test_without_long_work_no_line_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # Time stands still, so no progress line is due.
    monkeypatch.setattr(
        "client_app.protocol.answer_once.Throttle", lambda say: Throttle(say, now=lambda: 0.0)
    )
    folder = bench.run(a_reply_at_a_time(bench.grid()))
    assert not [
        event for event in events(folder) if event["event"] in ("at_work", "progress", "waiting")
    ]


def test_client_is_at_work_only_while_working(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[bool]] = {"during": [], "after": []}
    grid = bench.grid()
    lineage = list[str]()

    def work(when: str) -> None:
        seen[when].append(AtWork(bench.folder / "state", lineage[-1]).anybody())

    real = client_app.methods.pruning.fedprllm._own_masks
    monkeypatch.setattr(
        client_app.methods.pruning.fedprllm,
        "_own_masks",
        lambda *given: (work("during"), real(*given))[1],
    )

    def look(request: Message, reply: Message) -> Message:
        work("after")
        return reply

    grid.tamper = {0: look, 1: look}
    grid.before_push = lambda message: lineage.append(read(message.content).header.lineage)
    bench.run(grid)
    assert seen["during"] == [True, True]
    assert seen["after"]
    assert not any(seen["after"])


def test_nothing_of_it_is_left_after_the_run(bench: Bench) -> None:
    bench.run()
    assert not list((bench.folder / "state").rglob("*.log"))


def test_sums_over_rounds_say_so(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run(pruning__strategy="iterative")
    shown = capsys.readouterr().out
    assert re.search(r"node-00001: masks, \d+\.\d s of work  \[", shown)
    assert re.search(r"node-00001: masks, \d+\.\d s of work, \d+\.\d s in 2 rounds  \[", shown)
    header = next(line for line in shown.splitlines() if "sparsity" in line and "model" in line)
    assert "bytes per client, 2 rounds" in header
    assert "time, whole run" in header
    bench.run()
    assert "rounds" not in next(
        line for line in capsys.readouterr().out.splitlines() if "bytes per client" in line
    )
    view = RunView("fedprllm")
    printed = [line for line in shown.splitlines() if not view.take(line)]
    assert any(", round 2 of 2" in line for line in shown.splitlines())
    assert not [line for line in printed if "░" in line or "█" in line]
    assert "enrolling" not in "".join(printed)
