"""Search for tensors of single clients in all bytes that the server has in a secure sum."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

import client_app.protocol.secure_sum
from espalier.messages.sums.summands import Numbers, SumSpec, Words, pack
from espalier.messages.tensor_blobs import views
from tests.bench import Bench
from tests.methods.promises.contracts import outgoing_bytes
from tests.methods.promises.secure_sum_promises import SecureFederations

PIECE = 16
"""Size in bytes of the pieces of a client's tensors that are searched for."""


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield pieces of a tensor's bytes that are unlikely to occur by chance."""
    for start in range(0, len(data) - PIECE + 1, 8):
        piece = data[start : start + PIECE]
        if len(set(piece)) >= PIECE // 2:
            yield piece


def occurring(wanted: set[bytes], data: bytes) -> set[bytes]:
    """Return the pieces that occur in ``data``, at any byte."""
    starts = np.unique([int.from_bytes(piece[:8], "little") for piece in wanted])
    found = set[bytes]()
    for offset in range(min(8, len(data))):
        words = np.frombuffer(data, "<u8", (len(data) - offset) // 8, offset)
        for place in np.flatnonzero(np.isin(words, starts)):
            start = offset + 8 * int(place)
            found.add(data[start : start + PIECE])
    return found & wanted


class Watch:
    """Bytes of a run: tensors that stay at the sites, and all that the server can read."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.blobs = dict[str, bytes]()
        """Stored plain blobs of all clients, by hash."""
        self.summands = set[bytes]()
        """Packed summands of all clients before they are masked."""
        self.server = set[bytes]()
        """Files, requests and replies."""

        def noted(numbers: Numbers, spec: SumSpec) -> Words:
            words = pack(numbers, spec)
            self.summands.add(words.tobytes())
            return words

        monkeypatch.setattr(client_app.protocol.secure_sum, "pack", noted)

    def look(self, request: Message) -> None:
        """Read all files before a request leaves."""
        for blob in (self.bench.folder / "state").glob("*/*/r*/*"):
            if blob.suffix != ".json":
                data = blob.read_bytes()
                self.blobs[hashlib.sha256(data).hexdigest()] = data
        self.read_files()
        self.server.add(outgoing_bytes(request))

    def read_files(self) -> None:
        """Read the files of the server; egress logs are those of the sites."""
        for file in (self.bench.folder / "runs").rglob("*"):
            if file.is_file() and "egress" not in file.parts:
                self.server.add(file.read_bytes())


class HiddenTensors(SecureFederations):
    """Promise that no tensor of a single client reaches the server."""

    def allowed(self, bench: Bench, folder: Path) -> bytes:
        """Return bytes whose pieces may occur, because other clients have them too."""
        return b""

    def test_no_tensor_of_a_client_reaches_the_server(
        self, secure: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Search files, requests and replies for pieces and hashes of each client's tensors.

        Tensors are searched as they are stored, and as the integers that are masked.
        """
        watch = Watch(secure, monkeypatch)
        grid = secure.grid()
        grid.before_push = watch.look
        folder = secure.run(grid)
        watch.read_files()
        watch.server |= {outgoing_bytes(reply) for _, reply in grid.received}
        # What the server pushes is stored by clients too.
        own = {
            key: data
            for key, data in watch.blobs.items()
            if not any(data in other for other in watch.server)
        }
        assert len(own) >= secure.num_clients
        assert len(watch.summands) >= secure.num_clients
        haystack = b"\x00\x01\x02".join(watch.server)
        assert not [key for key in own if key.encode() in haystack]
        tensors: list[Any] = [values for data in own.values() for values in views(data).values()]
        stored = {
            piece for values in tensors for piece in pieces(np.ascontiguousarray(values).tobytes())
        }
        added = {piece for data in watch.summands for piece in pieces(data)}
        allowed = occurring(stored | added, self.allowed(secure, folder))
        assert not occurring(stored - allowed, haystack)
        assert not occurring(added - allowed, haystack)
        assert len(stored | added) - len(allowed) >= 100
