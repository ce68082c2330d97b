"""Directory of a new or resumed run, used by one server at a time.

``run.json`` records whether a run is completed. ``summary.json`` is for people and programs that
read results (``espalier.results``); this module never reads it.
"""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from espalier.environment.hub_models import COMMIT, hub_name
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.ledger import dense_bytes_of
from espalier.settings.run import RunSettings, changes, of_the_result
from espalier.storage.atomic import Damaged, read_sealed, sealed, write_bytes
from espalier.storage.directory_lock import locked, require_free
from strategies.base.checkpoint import CheckpointFolder
from strategies.base.run import identity
from strategies.base.run_folder import RunFolder, cannot_be_made

FILE = "run.json"
"""Name of the file with a run's lineage, its settings and model, and whether it is completed.

A resumed run must have the same settings and model.
"""
VERSION = 2


@dataclass
class RunDirectory:
    """Directory of one run; no other process works in it."""

    folder: RunFolder
    document: dict[str, Any]
    """Contents of ``run.json``."""

    @property
    def lineage(self) -> str:
        """Name of the run for its clients, which stays the same after a resumption."""
        return str(self.document["lineage"])

    def write(self) -> None:
        """Write ``run.json``."""
        write_bytes(self.folder.path / FILE, sealed(self.document))

    def note_completed(self) -> None:
        """Mark the run as completed, so that it cannot be resumed."""
        self.document["completed"] = True
        self.write()


@contextmanager
def open_run_directory(
    settings: RunSettings, model: OpenedModel, run_id: str
) -> Iterator[RunDirectory]:
    """Make or open the run directory, and hold its lock.

    Raises
    ------
    InputError
        The directory cannot be written; or ``resume-from`` is not a run directory, another server
        works there, ``run.json`` is damaged, the run is completed, or it had other settings (each
        is named) or another model.
    """
    if settings.resume_from:
        path = _existing(settings)
        # The lock is held for the whole run.
        with locked(path):
            document = _require_continued(settings, model, path)
            yield RunDirectory(RunFolder(path, dense_bytes_of(model.plan)), document)
        return
    folder, lineage = RunFolder.of_new_run(settings, model, run_id)
    document = {
        "version": VERSION,
        "completed": False,
        "lineage": lineage,
        "model_sha256": model.sha256,
        "settings": of_the_result(settings.nested()),
    }
    # Locked before ``run.json`` exists: no other server can resume it meanwhile.
    with locked(folder.path):
        directory = RunDirectory(folder, document)
        directory.write()
        write_bytes(folder.path / "settings.toml", tomli_w.dumps(settings.nested()).encode())
        yield directory


def require_run_directory(settings: RunSettings, model: OpenedModel) -> None:
    """Check that the run directory can be made or resumed, without making or locking anything.

    Raises
    ------
    InputError
        For the reasons of ``open_run_directory`` and, for a resumed run, of loading its checkpoint.
    """
    if not settings.resume_from:
        _require_place(settings)
        return
    # As in ``open_run_directory``, but without making or locking anything.
    path = _existing(settings)
    require_free(path)
    _require_continued(settings, model, path)
    folder = RunFolder(path)
    if CheckpointFolder(folder.checkpoint).load(identity(settings, model)) is None:
        folder.require_not_begun()
    folder.load_times()


def _require_place(settings: RunSettings) -> None:
    """Raise InputError if no directory can be made in ``out-dir``.

    The closest existing parent must be a directory in which this process can write.
    """
    path = at_home(settings.out_dir).absolute()
    # The closest existing parent decides.
    for place in (path, *path.parents):
        try:
            os.stat(place)
        except FileNotFoundError:
            if place.is_symlink():
                raise cannot_be_made(settings, path, f"{place} is a link to nothing") from None
            continue
        except OSError as error:
            raise cannot_be_made(settings, path, error.strerror) from None
        if not place.is_dir():
            raise cannot_be_made(settings, path, os.strerror(errno.ENOTDIR))
        # ``os.access`` allows everything to an administrator, also where nothing can be made.
        try:
            os.rmdir(tempfile.mkdtemp(dir=place))
        except OSError as error:
            raise cannot_be_made(settings, path, error.strerror) from None
        return


def _existing(settings: RunSettings) -> Path:
    path = at_home(settings.resume_from).absolute()
    if not os.path.isfile(path / FILE):
        raise InputError(f"{_given(settings)}: {path} is not a run directory")
    return path


def model_before(settings: RunSettings) -> str:
    """Return ``model``; a resumed run keeps the commit of a model that is named without one.

    Raises InputError if ``resume-from`` is not a run directory, or ``run.json`` is damaged.
    """
    now = hub_name(settings.model)
    # A run with a commit, or without the hub, keeps its name.
    if not settings.resume_from or now is None or COMMIT.fullmatch(now[1]):
        return settings.model
    was = str(_read(_existing(settings), _given(settings))["settings"]["model"])
    repository, revision = hub_name(was) or ("", "")
    return was if repository == now[0] and COMMIT.fullmatch(revision) else settings.model


def _require_continued(settings: RunSettings, model: OpenedModel, path: Path) -> dict[str, Any]:
    """Return the contents of ``run.json`` if these settings and this model continue that run."""
    setting = _given(settings)
    was = _read(path, setting)
    # Settings that affect the result must be the same.
    before, now = was["settings"], of_the_result(settings.nested())
    unknown = sorted(before.keys() ^ now.keys())
    completed = f"{setting}: the run is completed; leave resume-from empty for a new run"
    if unknown and before.get("method") == now.get("method"):
        if was["completed"]:
            raise InputError(completed)
        raise InputError(
            f"{setting}: another version of Espalier began the run (only one of both has"
            f" {', '.join(unknown)}); continue it with that version, or start a new run with the"
            f" settings of {path / 'settings.toml'}"
        )
    differing = changes(before, now)
    if was["model_sha256"] != model.sha256:
        differing.append("the base model differs")
    if differing:
        raise InputError(f"{setting}: a resumed run keeps its settings, but {'; '.join(differing)}")
    if was["completed"]:
        raise InputError(completed)
    return was


def _given(settings: RunSettings) -> str:
    return f"resume-from = {settings.resume_from!r}"


def _read(path: Path, setting: str) -> dict[str, Any]:
    try:
        return read_sealed(path / FILE, VERSION)
    except Damaged as damaged:
        raise InputError(
            f"{setting}: {damaged}; the directory is otherwise unchanged, but the run can no"
            f" longer be identified: restore {FILE} from a backup, or start a new run with the"
            f" settings of {path / 'settings.toml'}"
        ) from None
    except EspalierError as error:
        raise InputError(f"{setting}: {error}") from None
