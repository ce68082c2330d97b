"""Output of a run: a live view in a terminal or a notebook, and plain lines everywhere else."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import StringIO
from typing import TYPE_CHECKING, Any

from espalier.launch.narrow_table import NarrowTable

if TYPE_CHECKING:
    from espalier.launch.run_view import RunView

Say = Callable[[str], None]
"""Function that receives each line of a run's log, with its line break."""

PER_SECOND = 4
"""Maximum number of times per second that a view is drawn."""
NOTEBOOK_WIDTH = 100
NOTEBOOK_HEIGHT = 30
WITHOUT_VIEW = ("", "dumb", "unknown")
"""Values of TERM for terminals that cannot move the cursor."""
BOXES = str.maketrans("┏┳┓┡╇┩├┼┤└┴┘┌┬┐━─┃│█░", "+" * 15 + "--" + "||" + "#.")
"""Characters of tables and bars, and what stands for them in an encoding that lacks them."""


def show(line: str) -> None:
    """Write a line, which has its line break, to standard output at once."""
    sys.stdout.write(_encodable(line, getattr(sys.stdout, "encoding", None)))
    sys.stdout.flush()


def be_silent(_: str) -> None:
    """Drop a line of the log."""


def _encodable(text: str, encoding: str | None) -> str:
    """Return text that an encoding has, with ASCII characters for boxes and bars."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(BOXES).encode(encoding, "replace").decode(encoding)
    return text


def run_output(method: str) -> AbstractContextManager[Say]:
    """Return the output of a run of ``method``: a block with the function that shows its lines.

    The view disappears at the end of the block; in a notebook its last state stays.
    """
    if _in_notebook():
        return _notebook_view(method)
    return _terminal_view(method) if _is_terminal() else nullcontext(show)


def _is_terminal() -> bool:
    """Return whether standard output is a terminal on which lines can be drawn again."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in WITHOUT_VIEW


@contextmanager
def _terminal_view(method: str) -> Iterator[Say]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from espalier.launch.run_view import RunView

    view = RunView(method)
    out = sys.stdout
    console = Console(file=out)
    live = Live(
        view,
        console=console,
        transient=True,
        refresh_per_second=PER_SECOND,
        vertical_overflow="crop",
        # Messages that go to a file must stay there.
        redirect_stderr=sys.stderr.isatty(),
    )

    def write(line: str) -> None:
        console.print(Text.from_ansi(_encodable(line, out.encoding)), soft_wrap=True)

    rest = NarrowTable(write, lambda: console.width)

    def say(line: str) -> None:
        line = line.rstrip("\r\n")
        if not view.take(line):
            rest(line)

    with live:
        try:
            yield say
        finally:
            rest.flush()
            # Text without a line break would be lost with the view.
            sys.stdout.flush()
            sys.stderr.flush()


def _in_notebook() -> bool:
    """Return whether this is a notebook, whose output can be changed later."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    # The shell of a terminal has no kernel.
    return getattr(shell, "kernel", None) is not None


@contextmanager
def _notebook_view(method: str) -> Iterator[Say]:
    from IPython.display import display

    from espalier.launch.run_view import RunView

    view = RunView(method)
    handle = display(_as_notebook_text(view), raw=True, display_id=True)
    drawn = time.monotonic()

    def say(line: str) -> None:
        nonlocal drawn
        if not view.take(line.rstrip("\n")):
            show(line)
        if time.monotonic() - drawn >= 1 / PER_SECOND:
            drawn = time.monotonic()
            handle.update(_as_notebook_text(view), raw=True)

    try:
        yield say
    finally:
        handle.update(_as_notebook_text(view), raw=True)


def _as_notebook_text(view: "RunView") -> dict[str, Any]:
    from rich.console import Console

    console = Console(
        file=StringIO(), width=NOTEBOOK_WIDTH, height=NOTEBOOK_HEIGHT, color_system=None,
        force_jupyter=False, force_terminal=False,
    )  # fmt: skip
    with console.capture() as drawn:
        console.print(view)
    return {"text/plain": drawn.get()}
