"""What ``espalier run`` knows of its run while it watches: its directory, its end, and how to go on if there is none."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.settings.mistakes import FLOWER_REPORTS_IT_TOO, RUN_DIRECTORY

COMPLETED = "finished:completed"


@dataclass
class WatchedRun:
    """A run as its log and its SuperLink tell of it.

    Parameters
    ----------
    arguments : what the command was given
    """

    arguments: Sequence[str]
    directory: str = ""
    """Run directory on the SuperLink's machine; empty until the ServerApp has made it."""
    status: str = ""
    """Flower's status; empty until the run has ended."""
    said_why: bool = False
    """Whether the ServerApp said why it failed."""

    def note(self, line: str) -> None:
        """Read a line of the log."""
        if line.startswith(RUN_DIRECTORY):
            self.directory = line.removeprefix(RUN_DIRECTORY).strip()
        self.said_why = self.said_why or line.startswith(FLOWER_REPORTS_IT_TOO)

    @property
    def completed(self) -> bool:
        """Whether the run is completed: Flower says so, or, where it was stopped first, the summary in the run directory."""
        if self.status == COMPLETED:
            return True
        if not self.directory:
            return False
        try:
            return bool(
                json.loads((Path(self.directory) / "summary.json").read_text())["status"]
                == "completed"
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def how_to_go_on(self) -> str:
        """The command that goes on where the run was broken off, in words for a person."""
        if not self.directory:
            return "the run had not begun its work; give the same command again"
        words = [word for word in self.arguments if not word.startswith("resume-from=")]
        command = shlex.join(["espalier", *words, f"resume-from={self.directory}"])
        return (
            f"what was finished is in {self.directory}; to go on after the last finished round:\n "
            f" {command}"
        )
