"""Results of a run that failed: kept for whoever looks for the fault, under names that no result has."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

RESULTS = ("model", "adapter", "clients", "generator.safetensors")
"""Names in the run directory that others take for a run's result."""
FAILED = "failed-"


def set_aside(folder: Path) -> None:
    """Rename the results in a run directory, as ``failed-model``; earlier ones of that name are replaced."""
    for name in RESULTS:
        with suppress(OSError):  # on a damaged disk the run's own error is the one to tell
            if (folder / name).exists():
                _remove(folder / f"{FAILED}{name}")
                os.rename(folder / name, folder / f"{FAILED}{name}")


def remove_set_aside(folder: Path) -> None:
    """Remove what an earlier try of a run that is now completed left."""
    for name in RESULTS:
        with suppress(OSError):
            _remove(folder / f"{FAILED}{name}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
