"""State of a run that ``espalier run`` watches: its directory, its status and how to resume it."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.errors import FLOWER_REPORTS_IT_TOO, RUN_DIRECTORY

COMPLETED = "finished:completed"


@dataclass
class WatchedRun:
    """Run as seen in its log and by its SuperLink.

    Parameters
    ----------
    arguments : arguments of the command
    """

    arguments: Sequence[str]
    directory: str = ""
    """Run directory on the SuperLink's machine; empty until the ServerApp has created it."""
    status: str = ""
    """Flower's status; empty until the run has ended."""
    said_why: bool = False
    """True if the ServerApp reported why the run failed."""

    def note(self, line: str) -> None:
        """Process a line of the log."""
        if line.startswith(RUN_DIRECTORY):
            self.directory = line.removeprefix(RUN_DIRECTORY).strip()
        self.said_why = self.said_why or line.startswith(FLOWER_REPORTS_IT_TOO)

    @property
    def completed(self) -> bool:
        """True if the run is completed.

        Flower reports it, or, if the run was stopped before that, the summary in the run directory
        does.
        """
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
        """Return the command that resumes the run, in a message for the user."""
        if not self.directory:
            return "the run had not started; give the same command again"
        words = [word for word in self.arguments if not word.startswith("resume-from=")]
        command = shlex.join(["espalier", *words, f"resume-from={self.directory}"])
        return (
            f"finished rounds are in {self.directory}; to resume after the last one:\n  {command}"
        )
