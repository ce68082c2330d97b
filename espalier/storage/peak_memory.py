"""Highest memory of simulated clients, which their processes note for the run's report.

A real site notes nothing, because the figure would have to leave it.
"""

from contextlib import suppress
from pathlib import Path

from espalier.environment.bounded_json import read_json_object
from espalier.errors import EspalierError
from espalier.storage.atomic import write_json
from espalier.storage.client_state import PrivateState
from espalier.storage.directory_lock import OWNER_ONLY_FILE

FILE = "peak-memory.json"
BYTES = "bytes"


def note_peak(state: PrivateState, num_bytes: int) -> None:
    """Note the highest resident memory of a process that worked for a client, in bytes."""
    if state.folder.is_dir() and num_bytes > _noted(state.folder / FILE):
        write_json(state.folder / FILE, {BYTES: num_bytes}, OWNER_ONLY_FILE)


def highest_peak(root: Path, lineage: str) -> int:
    """Return the highest memory that any client of a run noted, in bytes; 0 if none did.

    Parameters
    ----------
    root : ``state-dir`` of the simulated clients
    """
    return max(map(_noted, (root / lineage).glob(f"*/{FILE}")), default=0)


def _noted(path: Path) -> int:
    # A file that is missing or damaged counts as none.
    with suppress(OSError, EspalierError):
        found = read_json_object(path).get(BYTES)
        return found if isinstance(found, int) else 0
    return 0
