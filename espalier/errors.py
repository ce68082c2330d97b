"""Errors that a user or a site's owner can fix, and the log lines that tell why a run failed."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TypeVar

D = TypeVar("D")

FLOWER_REPORTS_IT_TOO = "(Flower's own report of it follows)"
"""Line that the ServerApp prints after it has reported why a run failed.

The traceback that Flower prints next contains nothing else of use.
"""

RUN_DIRECTORY = "run directory "
"""Beginning of the line with which the ServerApp prints the run directory.

``espalier run`` reads the directory from it, to print the command that resumes the run.
"""

NOT_LOADED = "could not load the run's program"
"""Error text for a node that could not load the run's program.

``espalier run`` may then submit the run once more, in another bundle.
"""


INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end the process or the generator.

Any other exception concerns only the current work, even if it is not an ``Exception``: a panic in a
Rust library raises ``PanicException``, which derives from ``BaseException``.
"""


def tell(message: object) -> None:
    """Print a message of the program to standard error."""
    print(f"espalier: {message}", file=sys.stderr, flush=True)


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the first line of a library's error, of at most ``most`` characters."""
    return (str(error).splitlines() or [""])[0][:most]


class EspalierError(ValueError):
    """Error that a person can fix: it names the key or file, the value and the remedy.

    ``text`` is for the machine on which the error occurred, and never quotes a line of data. If it
    states something that was counted or found in a site's data, ``outward`` leaves the site in its
    place.
    """

    def __init__(self, text: str, outward: str | None = None) -> None:
        super().__init__(text)
        self._outward = outward

    @property
    def outward(self) -> str:
        """Message that may leave the site."""
        return str(self) if self._outward is None else self._outward

    def restrict(self, outward: str) -> None:
        """Set the message that may leave the site, unless the error came with one."""
        if self._outward is None:
            self._outward = outward


class InputError(EspalierError):
    """Error in a setting, file or other input of a user."""

    def at(self, place: str) -> "InputError":
        """Return the error with its place in a site's data, which does not leave the site."""
        return InputError(f"{place}: {self}", self._outward)


def as_command(work: Callable[[D], None]) -> Callable[[D], int]:
    """Decorate ``main(document)`` of a command, which then returns an exit code.

    The code is 0, or 2 after an EspalierError, which is printed.
    """

    @wraps(work)
    def main(document: D) -> int:
        try:
            work(document)
        except EspalierError as error:
            tell(error)
            return 2
        return 0

    return main


class RunError(EspalierError):
    """Error of a run that has started and failed.

    Parameters
    ----------
    parts : messages about the end of the run, of which the last may say how to resume it
    path : run directory on the SuperLink's machine; None if the run made none
    reason : why the run failed, as its log says; empty if the log does not
    """

    def __init__(self, parts: Sequence[str], path: Path | None, reason: str = "") -> None:
        super().__init__("\n".join(filter(None, [*parts, reason])))
        self.parts = parts
        self.path = path
        self.reason = reason


class RunInterrupted(KeyboardInterrupt):
    """Interrupt of a run before its end (Ctrl-C).

    Parameters
    ----------
    resume_hint : how to resume the run, in a message for the user
    path : run directory on the SuperLink's machine; None if the run made none
    """

    def __init__(self, resume_hint: str, path: Path | None) -> None:
        super().__init__(resume_hint)
        self.resume_hint = resume_hint
        self.path = path


class ProtocolError(EspalierError):
    """Error in a message that breaks its contract."""


class StateLost(EspalierError):
    """Error of a client that lost the state of earlier rounds.

    If the method supports it, the server sends the client what it needs to catch up.
    """


class NoAnswerError(RuntimeError):
    """Error for a message that is not answered; its text may be sent to the server.

    Covers: the text is ours and contains no data of the site. For any other error, the warm node
    sends only the type. Contracts limit the content of answers; a Flower error has none.
    Does not cover: Flower's own node, which sends the text of errors raised outside the ClientApp's
    handlers.
    """
