"""Disk space for models that servers push to a site.

Space is reserved when a model is offered, so that offers of several runs at the same time share the
limit. Each model's folder records the number of bytes offered. The larger of that number and the
bytes on disk counts. If others need the space, an incomplete model is deleted after one hour
without messages about it.

Covers: processes of one machine that share a state directory. They take turns with a lock on
``models``.
"""

import time
from contextlib import suppress
from pathlib import Path

from espalier.environment.bounded_json import read_json
from espalier.errors import InputError
from espalier.messages.blobs.model_pieces import Manifest
from espalier.settings.node import NodeSettings
from espalier.storage.atomic import write_json
from espalier.storage.client_state import (
    OWNER_ONLY_FILE,
    VERSION_FILE,
    mark_as_ours,
    private_folder,
    remove_ours,
)
from espalier.storage.directory_lock import FILE, in_turn

MODELS = "models"
RESERVED = "reserved.json"
"""Name of the file in a model's folder with the number of bytes offered."""
FOUND = "found.json"
"""Name of the file in a model's folder with the offer, and the stamps of the checked files."""
ABANDONED_SECONDS = 3600
"""Seconds until an incomplete model is abandoned; longer than a server waits for an answer."""


def reserve(node: NodeSettings, manifest: Manifest) -> None:
    """Reserve space for a model, if it has none yet.

    Raises
    ------
    InputError
        The model exceeds the owner's limit, alone or together with the models that are stored or
        offered here.
    """
    most = node.max_bytes_of_models()
    wanted = manifest.num_bytes
    if most is not None and wanted > most:
        raise InputError(
            f"max-model-bytes = {most}: the run's model has {wanted} bytes, more than this"
            " site's owner allows; raise the limit in --node-config"
        )
    models = private_folder(node.state_root(), MODELS)
    folder = models / manifest.sha256
    with in_turn(models):
        if most is not None and _taken_beside(folder) + wanted > most:
            _remove_abandoned(folder)
        if most is not None and (taken := _taken_beside(folder)) + wanted > most:
            raise InputError(
                f"max-model-bytes = {most}: models of other runs use or have reserved {taken}"
                f" bytes, so there is no room for this model of {wanted} bytes; raise the limit"
                " in --node-config, or remove models below models/ in the site's state-dir"
            )
        private_folder(models, manifest.sha256)
        if not (folder / VERSION_FILE).exists():
            mark_as_ours(folder)
        # Taking the folder's lock updates the time of last use.
        with in_turn(folder):
            if not (folder / RESERVED).exists():
                write_json(folder / RESERVED, {"bytes": wanted}, OWNER_ONLY_FILE)


def _taken_beside(own: Path) -> int:
    """Return the number of bytes that other models use or have reserved."""
    return sum(
        _taken(folder) for folder in own.parent.iterdir() if folder.is_dir() and folder != own
    )


def _taken(folder: Path) -> int:
    reserved = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        reserved = int(read_json((folder / RESERVED).read_text())["bytes"])
    there = 0
    for file in folder.rglob("*"):
        # Another process may have joined the pieces to a file meanwhile.
        with suppress(OSError):
            there += file.stat().st_size if file.is_file() and file.name not in OUR_OWN else 0
    return max(reserved, there)


OUR_OWN = (RESERVED, FOUND, VERSION_FILE, FILE)
"""Names of files in a model's folder that no server sent."""


def _remove_abandoned(own: Path) -> None:
    """Delete incomplete models without messages for ``ABANDONED_SECONDS``."""
    for folder in own.parent.iterdir():
        lock = folder / FILE
        if folder == own or not folder.is_dir() or (folder / FOUND).exists() or not lock.exists():
            continue
        if lock.stat().st_mtime < time.time() - ABANDONED_SECONDS:
            remove_ours(folder)
