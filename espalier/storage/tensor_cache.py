"""Cache of tensors on a node that follow from a model and a run's settings.

Each model and kind of tensors has a folder, ``<root>/<key>``, with a file for each entry: the
SHA-256 of its name and content, then safetensors.

Covers:

- Other users of the machine cannot read the cache (owner-only permissions).
- A file appears complete or not at all (atomic rename).
- Of two processes that need an entry, one computes it (a lock that ends with its process).
- A damaged file is detected by its hash and created again.
- A folder that was not used for as long as the node keeps the state of runs is deleted with that
  state.

Does not cover: an attacker who uses the owner's account and writes matching hashes.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from espalier.storage.atomic import write_bytes
from espalier.storage.client_state import marked_folder
from espalier.storage.directory_lock import LOCK, OWNER_ONLY_FILE, in_turn

Named = dict[str, Tensor]


class TensorCache:
    """Entries of one model and kind.

    Raises InputError if the folder is not writable.

    Parameters
    ----------
    root : folder of all caches of a kind
    parts : everything that determines the bits, as values of JSON
    """

    def __init__(self, root: Path, parts: list[Any]) -> None:
        self.folder = marked_folder(root, cache_key(parts))
        with suppress(FileNotFoundError):
            # The node deletes entries that were not used for its number of days.
            os.utime(self.folder / LOCK)

    def get(self, name: str, make: Callable[[], Named]) -> Named:
        """Return the entry ``name`` on the CPU; if it is missing or damaged, make and store it."""
        path = self.folder / name
        data = _read(path)
        if data is None:
            with in_turn(self.folder):
                # Another process may have written the file while this one waited for the lock.
                data = _read(path)
                if data is None:
                    data = save(make())
                    # Unfinished files come from killed processes; this one holds the lock.
                    for unfinished in self.folder.glob(f".{name}.*"):
                        unfinished.unlink()
                    write_bytes(path, _digest(name, data) + data, OWNER_ONLY_FILE)
        return load(data)


def cache_key(parts: list[Any]) -> str:
    """Return the SHA-256 of everything that determines the bits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(path: Path) -> bytes | None:
    """Return the content of a file without its hash; None if it is missing or damaged."""
    with suppress(OSError), open(path, "rb") as file:
        digest = file.read(hashlib.sha256().digest_size)
        data = file.read()
        if digest == _digest(path.name, data):
            return data
    return None


def _digest(name: str, data: bytes) -> bytes:
    # The hash includes the name, so that entries cannot be exchanged unnoticed.
    digest = hashlib.sha256(name.encode())
    digest.update(data)
    return digest.digest()
