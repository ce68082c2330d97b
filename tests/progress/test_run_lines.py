"""Lines of a run's log say what they were written from, and nothing else is taken for them."""

import pytest

from espalier.run_lines import LabelledLine, PhaseLine, StepLine, bar


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        (PhaseLine("averaging", 6), "averaging    ░░░░░░░░░░░░░░░░░░░░░░░░ 0/6"),
        (
            PhaseLine("training", 3, of_clients=True, server_round=(2, 5)),
            "training     ░░░░░░░░░░░░░░░░░░░░░░░░ 0/3 clients, round 2 of 5",
        ),
        (
            PhaseLine("local scores", 12, of_clients=True),
            "local scores ░░░░░░░░░░░░░░░░░░░░░░░░ 0/12 clients",
        ),
    ],
)
def test_phase_is_read_as_written(phase: PhaseLine, line: str) -> None:
    assert str(phase) == line
    assert PhaseLine.read(line) == phase
    assert StepLine.read(line) is LabelledLine.read_progress(line) is None


@pytest.mark.parametrize("text", ["site-a: adapters, 27 s of work", "block 3  [of 4]", "a"])
def test_step_is_read_as_written(text: str) -> None:
    step = StepLine("training", 1, 3, text)
    line = step.line(3 * 3600.0, 60 * 60.0 * 24 * 3)
    assert line == f"training     ████████░░░░░░░░░░░░░░░░ 1/3  {text}  [3 h, 3 d left]"
    assert StepLine.read(line) == step
    assert PhaseLine.read(line) is None


@pytest.mark.parametrize("who", ["site-a", "hospital-of-the-north", "averaging"])
def test_progress_is_read_as_written(who: str) -> None:
    progress = LabelledLine(who, "train: training step 2 of 20")
    assert LabelledLine.read_progress(f"{progress}  [2 min 11 s]") == progress


def test_labels_of_other_lines_are_read() -> None:
    assert LabelledLine.read("dropped      site-a: no reply") == LabelledLine(
        "dropped", "site-a: no reply"
    )
    assert LabelledLine.read("dropped") is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "the run failed: no quorum",
        "run directory /runs/1",
        "│ federated │ 97.10 │",
        "training     ████ 1/3  site-a  [3 s, 6 s left]",
        "INFO :      Starting Flower Simulation  [now]",
        "ValueError: 1/3  site-a  [3 s, 6 s left]",
        "training     ░░░░░░░░░░░░░░░░░░░░░░░░ 0/3 clients, but not",
    ],
)
def test_other_lines_are_no_progress(line: str) -> None:
    assert PhaseLine.read(line) is StepLine.read(line) is None
    assert LabelledLine.read_progress(line) is None


def test_bar_is_never_longer_than_its_width() -> None:
    assert [bar(done, 3, 6) for done in range(5)] == [
        "░░░░░░", "██░░░░", "████░░", "██████", "██████",
    ]  # fmt: skip
    assert bar(0, 0, 3) == "░░░"
