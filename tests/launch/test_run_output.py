"""Live view of a run in a pseudo-terminal, and plain lines everywhere else."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyte
import pytest

from espalier.launch import run_output as output_module
from espalier.launch.run_output import run_output, show
from espalier.run_lines import LabelledLine, PhaseLine, StepLine

APP = Path(__file__).parents[2]
SECONDS = 30.0
"""Maximum wait for a text on the screen."""
PROGRAM = """
import sys
from espalier.launch.run_output import run_output
try:
    with run_output("flap") as say:
        for line in map(bytes.decode, sys.stdin.buffer):
            if line.startswith("stderr"):
                print(line, end="", file=sys.stderr)
            elif line.startswith("error"):
                raise ValueError(line.strip())
            else:
                say(line)
except KeyboardInterrupt:
    print("interrupted")
"""
TABLE = [
    "flap: perplexity",
    "┏━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓",
    "┃ model     ┃  code ┃ bytes per client, 2 rounds ┃",
    "┡━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩",
    "│ dense     │ 94.75 │                          - │",
    "├───────────┼───────┼────────────────────────────┤",
    "│ federated │ 97.10 │ 349,588 up, 1,224,078 down │",
    "└───────────┴───────┴────────────────────────────┘",
    "the report is in /runs/flap/report.html",
]


class Terminal:
    """Program in a pseudo-terminal, which shows the lines that it is told."""

    def __init__(self, columns: int, rows: int, errors: Any = None, **environment: str) -> None:
        master, slave = pty.openpty()
        self.size(master, columns, rows)
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._master = master
        # Variables like those of pytest's workers would hide the size of the terminal.
        sizes = ("COLUMNS", "LINES")
        inherited = {name: text for name, text in os.environ.items() if name not in sizes}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=slave,
            stderr=errors or slave, cwd=APP,
            env={**inherited, "PYTHONIOENCODING": "utf-8", "TERM": "xterm", **environment},
        )  # fmt: skip
        os.close(slave)

    @staticmethod
    def size(master: int, columns: int, rows: int) -> None:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        self.size(self._master, columns, rows)
        self.screen.resize(rows, columns)

    def tell(self, *lines: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def shows(self, *texts: str) -> bool:
        """Wait until all texts are on the screen or in its history."""
        return self._read(lambda: all(text in self.text() for text in texts))

    def end(self) -> str:
        """End the input and return all that was on the screen at the end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._read(lambda: False)
        self.process.wait(SECONDS)
        return self.text()

    def text(self) -> str:
        """Return the lines of the history and the screen."""
        columns = range(self.screen.columns)
        before = ["".join(row[x].data for x in columns) for row in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*before, *self.screen.display])

    def _read(self, enough: Callable[[], bool]) -> bool:
        end = time.monotonic() + SECONDS
        while not enough():
            if time.monotonic() > end:
                return False
            if not select.select([self._master], [], [], 0.1)[0]:
                continue
            try:
                found = os.read(self._master, 65536)
            except OSError:
                # Linux reports the end of the last writer as an error.
                return enough()
            self._stream.feed(found)
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Return a function that opens a terminal of some columns and rows."""
    opened: list[Terminal] = []

    def give(columns: int = 80, rows: int = 24, **more: Any) -> Terminal:
        opened.append(Terminal(columns, rows, **more))
        return opened[-1]

    yield give
    for one in opened:
        one.close()


def step(phase: str, done: int, total: int, text: str) -> str:
    return StepLine(phase, done, total, text).line(3.0, 6.0)


ENROLLING = [
    PhaseLine("enrolling", 2, of_clients=True),
    step("enrolling", 1, 2, "site-a: client 0"),
    step("enrolling", 2, 2, "site-b: client 1"),
]
TRAINING = [
    PhaseLine("training", 2, of_clients=True, server_round=(2, 3)),
    step("training", 1, 2, "site-a: adapters, 27 s of work"),
    f"{LabelledLine('site-b', 'train: training step 2 of 20')}  [11 s]",
]


def test_view_has_phase_round_clients_and_quality(terminal: Callable[..., Terminal]) -> None:
    screen = terminal()
    screen.tell("run directory /runs/flap", *ENROLLING)
    screen.tell("measured     after round 1: code 81.12", *TRAINING)
    assert screen.shows(
        "flap · round 2 of 3 · training 1/2 clients",
        "site-a       adapters, 27 s of work",
        "site-b       train: training step 2 of 20",
        "quality round 1: code 81.12",
        "left of the rounds",
    )
    screen.tell(*TABLE)
    end = screen.end().splitlines()
    assert [line for line in end if line] == [
        "run directory /runs/flap",
        "measured     after round 1: code 81.12",
        *TABLE,
    ]
    assert screen.process.returncode == 0
    assert not screen.screen.cursor.hidden


def test_narrow_terminal_has_table_as_list(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(40, 12)
    screen.tell(*ENROLLING, *TRAINING)
    assert screen.shows("flap · round 2 of 3 · training 1/2 clie")
    screen.tell(*TABLE)
    end = screen.end()
    assert [line for line in end.splitlines() if line] == [
        "flap: perplexity",
        "dense",
        "  code                        94.75",
        "federated",
        "  code                        97.10",
        "  bytes per client, 2 rounds  349,588 up",
        ", 1,224,078 down",
        "the report is in /runs/flap/report.html",
    ]


def test_terminal_may_change_its_size(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(100, 24)
    screen.tell(*ENROLLING, *TRAINING)
    assert screen.shows("training 1/2 clients ████████████░░░░░░░░░░░░")
    screen.resize(44, 10)
    screen.tell(step("training", 2, 2, "site-b: adapters, 3 s of work"))
    assert screen.shows("training 2/2 clients")
    screen.tell("the report is in /runs/flap")
    assert screen.end().rstrip().endswith("the report is in /runs/flap")


def test_errors_stay_on_the_screen(terminal: Callable[..., Terminal]) -> None:
    screen = terminal()
    screen.tell(*ENROLLING, *TRAINING, "dropped      site-b: train: no reply", "stderr warning")
    screen.tell("\x1b[91mERROR\x1b[0m:  Traceback", "the run failed: no quorum", "error of the run")
    end = screen.end()
    assert "dropped      site-b: train: no reply\nstderr warning\nERROR:  Traceback\n" in end
    assert "the run failed: no quorum\nTraceback (most recent call last)" in end
    assert "ValueError: error of the run" in end
    assert "adapters" not in end
    assert not screen.screen.cursor.hidden


def test_messages_go_to_their_file(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    with open(tmp_path / "errors", "wb") as errors:
        screen = terminal(errors=errors)
        screen.tell(*ENROLLING, "stderr warning", "the end")
        assert "stderr" not in screen.end()
    assert (tmp_path / "errors").read_text() == "stderr warning\n"


def test_interrupt_ends_the_view(terminal: Callable[..., Terminal]) -> None:
    screen = terminal()
    screen.tell("run directory /runs/flap", *ENROLLING, *TRAINING)
    assert screen.shows("training 1/2")
    screen.process.send_signal(signal.SIGINT)
    assert screen.shows("interrupted")
    assert screen.end().split() == ["run", "directory", "/runs/flap", "interrupted"]
    assert not screen.screen.cursor.hidden


def test_no_color_has_no_colors(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(NO_COLOR="1")
    screen.tell(*ENROLLING, *TRAINING, "\x1b[91mERROR\x1b[0m: all")
    assert screen.shows("training 1/2", "ERROR: all")
    buffer = screen.screen.buffer
    assert {cell.fg for row in buffer.values() for cell in row.values()} == {"default"}


def test_terminal_without_unicode(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(PYTHONIOENCODING="ascii")
    screen.tell("the site is Universitaet", *ENROLLING, *TRAINING)
    assert screen.shows("flap - round 2 of 3 - training 1/2 clients ############....")
    assert screen.end().isascii()


def test_dumb_terminal_has_plain_lines(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(120, TERM="dumb")
    screen.tell(*ENROLLING, *TRAINING)
    assert [line for line in screen.end().splitlines() if line] == [
        str(line) for line in [*ENROLLING, *TRAINING]
    ]


def test_log_has_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with run_output("flap") as say:
        for line in [*ENROLLING, *TRAINING, *TABLE]:
            say(f"{line}\n")
    assert capsys.readouterr().out.splitlines() == [
        str(line) for line in [*ENROLLING, *TRAINING, *TABLE]
    ]


def test_log_without_unicode_has_other_characters(tmp_path: Path) -> None:
    with (
        open(tmp_path / "log", "w", encoding="latin-1") as log,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", log)
        show("training █░ ┃ é 語\n")
    assert (tmp_path / "log").read_text(encoding="latin-1") == "training #. | é ?\n"


class Cell:
    """Output of a notebook's cell, which records what it displayed."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> "Cell":
        assert (raw, display_id) == (True, True)
        self.update(content, raw=True)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(content["text/plain"])


def test_notebook_has_view_and_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell()
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel="a kernel")  # type: ignore[attr-defined]
    ipython_display = ModuleType("IPython.display")
    ipython_display.display = cell.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython_display)
    monkeypatch.setattr(output_module, "PER_SECOND", float("inf"))
    with run_output("flap") as say:
        for line in [*ENROLLING, *TRAINING, "the report is in /runs/flap"]:
            say(f"{line}\n")
    assert capsys.readouterr().out == "the report is in /runs/flap\n"
    assert cell.shown[0].startswith("flap · starting\n")
    assert cell.shown[-1].startswith("flap · round 2 of 3 · training 1/2 clients ████████████░░░")
    assert len(cell.shown) == 2 + len([*ENROLLING, *TRAINING]) + 1
