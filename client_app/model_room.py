"""Room for models that servers bring: reserved when a model is offered, so that offers of several runs at once share it.

Each model's folder says how many bytes were offered; what counts is that, or what lies there if it is more. A model that never
came whole is removed, if others need its room, when nothing was heard of it for an hour.
Covers: processes of one machine that share a state directory, in turn (a lock of ``models``).
"""

import time
from contextlib import suppress
from pathlib import Path

from espalier.settings.bounded_json import read_json
from espalier.settings.mistakes import Mistake
from espalier.settings.node import NodeSettings
from espalier.storage.atomic import write_json
from espalier.storage.directory_lock import FILE, in_turn
from espalier.storage.private import (
    OWNER_ONLY_FILE,
    VERSION_FILE,
    mark_as_ours,
    private_folder,
    remove_ours,
)
from espalier.wire.model_folder import Manifest

MODELS = "models"
RESERVED = "reserved.json"
"""In a model's folder: bytes that were offered."""
FOUND = "found.json"
"""In a model's folder: what was offered, and what the files' stamps were when their bytes had the right hashes."""
ABANDONED_SECONDS = 3600
"""After which a model counts as given up of which pieces are missing; longer than a server waits for an answer."""


def reserve(node: NodeSettings, manifest: Manifest) -> None:
    """Reserve room for a model, if it has none yet.

    Raises
    ------
    Mistake
        The site's owner allows no model as large, or none beside those that are here or offered.
    """
    most = node.most_bytes_of_models()
    wanted = manifest.num_bytes
    if most is not None and wanted > most:
        raise Mistake(
            f"most-model-bytes = {most}: this site's owner allows no larger model, the run's has"
            f" {wanted} bytes; raise it in --node-config"
        )
    models = private_folder(node.state_root(), MODELS)
    folder = models / manifest.sha256
    with in_turn(models):
        if most is not None and _taken_beside(folder) + wanted > most:
            _remove_abandoned(folder)
        if most is not None and (taken := _taken_beside(folder)) + wanted > most:
            raise Mistake(
                f"most-model-bytes = {most}: models of other runs take or have reserved {taken}"
                f" bytes, so that this one, of {wanted} bytes, has no room; raise it in"
                " --node-config, or remove some below models/ in the site's state-dir"
            )
        private_folder(models, manifest.sha256)
        if not (folder / VERSION_FILE).exists():
            mark_as_ours(folder)
        with in_turn(folder):  # its lock's time is that of use
            if not (folder / RESERVED).exists():
                write_json(folder / RESERVED, {"bytes": wanted}, OWNER_ONLY_FILE)


def _taken_beside(own: Path) -> int:
    """Return the bytes that other models take, or may take."""
    return sum(
        _taken(folder) for folder in own.parent.iterdir() if folder.is_dir() and folder != own
    )


def _taken(folder: Path) -> int:
    reserved = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        reserved = int(read_json((folder / RESERVED).read_text())["bytes"])
    there = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # another process has made a file of its pieces meanwhile
            there += file.stat().st_size if file.is_file() and file.name not in OUR_OWN else 0
    return max(reserved, there)


OUR_OWN = (RESERVED, FOUND, VERSION_FILE, FILE)
"""Files of a model's folder that no server sent."""


def _remove_abandoned(own: Path) -> None:
    """Remove models that never came whole, and of which nothing was heard for long."""
    for folder in own.parent.iterdir():
        lock = folder / FILE
        if folder == own or not folder.is_dir() or (folder / FOUND).exists() or not lock.exists():
            continue
        if lock.stat().st_mtime < time.time() - ABANDONED_SECONDS:
            remove_ours(folder)
