"""Results of a failed run, kept for debugging under names that no result has."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

RESULTS = ("model", "adapter", "clients", "generator.safetensors")
"""Names in the run directory that other programs take for a run's result."""
FAILED = "failed-"


def set_aside(folder: Path) -> None:
    """Rename the results in a run directory, for example to ``failed-model``.

    Earlier results with these names are replaced.
    """
    for name in RESULTS:
        # On a damaged disk, the run's own error is the one to report.
        with suppress(OSError):
            if (folder / name).exists():
                _remove(folder / f"{FAILED}{name}")
                os.rename(folder / name, folder / f"{FAILED}{name}")


def remove_set_aside(folder: Path) -> None:
    """Delete the renamed results of an earlier attempt after the run has completed."""
    for name in RESULTS:
        with suppress(OSError):
            _remove(folder / f"{FAILED}{name}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
