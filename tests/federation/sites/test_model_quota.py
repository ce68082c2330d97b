"""Limit of the disk space for pushed models.

All servers that push models to a site share it, also if several runs offer models at once.
"""

import hashlib
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from client_app import model_folder
from client_app.model_folder import downloaded_model
from client_app.protocol.model_download import take_offer, take_piece
from client_app.simulation import in_simulation
from client_app.site import Site
from espalier.errors import EspalierError, StateLost
from espalier.messages.blobs.model_pieces import BYTES, MIN_PIECE_BYTES, PIECE, Manifest
from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.tensor_blobs import pack_tensors
from espalier.settings.keys import default_values
from tests.run_names import named

MOST = 20_000
PIECE_BYTES = MIN_PIECE_BYTES


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server:
    """Server of one run that offers a folder with one file, split into pieces."""

    def __init__(
        self, root: Path, run: str, data: bytes, piece_bytes: int = PIECE_BYTES, **node: Any
    ) -> None:
        self.data = data
        self.pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
        self.offered = Manifest(
            names=["model.safetensors"], sizes=[len(data)], file_sha256=[sha256(data)],
            piece_bytes=piece_bytes, piece_sha256=[sha256(piece) for piece in self.pieces],
        )  # fmt: skip
        self.header = Header(
            schema_version=SCHEMA_VERSION, kind="push", method="fedsoda", lineage=named(run),
            server_round=1, client=0, attempt=1, part=0, num_parts=1,
        )  # fmt: skip
        config = {"site": "ward", "state-dir": str(root / "state"), "max-model-bytes": MOST} | node
        context = Context(1, 1, config, RecordDict(), {**default_values(), "method": "fedsoda"})
        self.site = Site.of(context, MessageBody(self.header))

    def offer(self) -> list[int]:
        lacking: list[int] = take_offer(
            self.site, MessageBody(self.header, self.offered.model_dump())
        ).fields["pieces"]
        return lacking

    def bring(self, index: int) -> None:
        data = self.pieces[index]
        fields = {
            "what": "piece",
            "model_sha256": self.offered.sha256,
            "index": index,
            "size": len(data),
        }
        blob = pack_tensors({BYTES: np.frombuffer(data, np.uint8)})
        take_piece(self.site, MessageBody(self.header, fields, {PIECE: blob}))

    def bring_all(self, lacking: list[int]) -> None:
        for index in lacking:
            self.bring(index)

    def brought(self) -> Path:
        return downloaded_model(self.site.node.state_root(), self.site.state(self.header))


def on_disk(root: Path) -> int:
    """Return the size of all models' files and pieces, in bytes."""
    found = [
        *(root / "state" / "models").rglob("files/*"),
        *(root / "state" / "models").rglob("pieces/*"),
    ]
    total = 0
    for file in found:
        # Another thread may be building the file from its pieces.
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def of(number: int, size: int) -> bytes:
    return Random(number).randbytes(size)


def test_a_real_site_is_asked() -> None:
    assert not in_simulation()


def test_offers_reserve_what_they_may_bring(tmp_path: Path) -> None:
    """No piece of the first model has arrived when the second offer comes."""
    first, second, third = (Server(tmp_path, str(n), of(n, 8_000 + n)) for n in range(3))
    first.offer()
    second.offer()
    with pytest.raises(
        EspalierError,
        match=r"use or have reserved 16001 bytes, so there is no room for this model of 8002 bytes",
    ):
        third.offer()
    assert len(list((tmp_path / "state" / "models").glob("*/"))) == 2
    for index in range(len(first.pieces)):
        first.bring(index)
    assert (first.brought() / "model.safetensors").read_bytes() == first.data
    assert first.offer() == []


def test_offers_at_once_share_the_room(tmp_path: Path) -> None:
    """Sixteen runs offer at once, and three models fit.

    Each run has its own thread and its own lock, because flock works per open file.
    """
    servers = [Server(tmp_path, str(n), of(n, 6_000)) for n in range(16)]
    taken = list[int]()
    start = threading.Barrier(16)
    most = list[int]()
    refused = list[str]()

    def work(number: int) -> None:
        start.wait()
        try:
            for index in servers[number].offer():
                servers[number].bring(index)
                most.append(on_disk(tmp_path))
            taken.append(number)
        except EspalierError as mistake:
            refused.append(str(mistake))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 3
    assert all("there is no room" in text for text in refused)
    assert max(most) <= MOST
    assert on_disk(tmp_path) == 18_000
    assert all(
        (servers[number].brought() / "model.safetensors").read_bytes() == servers[number].data
        for number in taken
    )


def test_other_cuts_of_file_take_no_more_room(tmp_path: Path) -> None:
    """Each run offers the same folder in pieces of another size.

    It sends all pieces but the last.
    """
    data = bytes(number * number % 251 for number in range(MOST))
    servers = [
        Server(tmp_path, str(size), data, size)
        for size in range(PIECE_BYTES, PIECE_BYTES + 100, 10)
    ]
    for server in servers:
        server.offer()
    for server in servers:
        for index in range(len(server.pieces) - 1):
            server.bring(index)
            assert on_disk(tmp_path) <= MOST
    last = servers[-1]
    for index in last.offer():
        last.bring(index)
    assert (last.brought() / "model.safetensors").read_bytes() == data


def test_disk_holds_files_and_one_piece_at_most(
    tmp_path: Path,
) -> None:
    """The limit holds also if the same piece occurs in several places."""
    server = Server(tmp_path, "a", bytes(5_000) + of(1, 15_000))
    seen = list[int]()
    for index in server.offer():
        server.bring(index)
        seen.append(on_disk(tmp_path))
    assert max(seen) <= MOST + PIECE_BYTES
    assert (server.brought() / "model.safetensors").read_bytes() == server.data
    assert not list((tmp_path / "state" / "models").rglob("*.blob"))


def test_larger_model_or_piece_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match=f"max-model-bytes = {MOST}: the run's model has"):
        Server(tmp_path, "a", of(1, MOST + 1)).offer()
    server = Server(tmp_path, "b", of(1, 5_500))
    server.offer()
    for data in (of(1, 5_500)[:999], of(1, 5_500)[:1001], of(2, 1000)):
        server.pieces[0] = data
        with pytest.raises(EspalierError, match="piece 0"):
            server.bring(0)
    server.pieces[5] = of(1, 1000)
    with pytest.raises(EspalierError, match="piece 5 does not have the size"):
        server.bring(5)
    assert on_disk(tmp_path) == 0


def test_too_small_pieces_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, "a", of(1, 500))
    server.offered = server.offered.model_copy(update={"piece_bytes": MIN_PIECE_BYTES - 1})
    with pytest.raises(
        EspalierError, match="Manifest: missing, surplus or out of range: piece_bytes"
    ):
        server.offer()


def test_files_with_wrong_hash_leave_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path, "a", of(1, 3_000))
    server.offered = server.offered.model_copy(update={"file_sha256": ["0" * 64]})
    lacking = server.offer()
    with pytest.raises(EspalierError, match="differs from the announced hash"):
        server.bring_all(lacking)
    assert on_disk(tmp_path) == 0
    with pytest.raises(StateLost):
        server.brought()


def test_json_that_is_nested_too_deep_is_not_kept(tmp_path: Path) -> None:
    server = Server(tmp_path, "a", b"[" * 2_000)
    server.offered = server.offered.model_copy(update={"names": ["tokenizer_config.json"]})
    lacking = server.offer()
    with pytest.raises(
        EspalierError, match=r"tokenizer_config.json of the model cannot be used: .* nested"
    ):
        server.bring_all(lacking)
    assert on_disk(tmp_path) == 0


def test_abandoned_model_makes_room_and_can_go_on(tmp_path: Path) -> None:
    """A reservation ends one hour after its last piece, if another model needs the space."""
    given_up, other = (Server(tmp_path, str(n), of(n, 15_000)) for n in range(2))
    given_up.offer()
    given_up.bring(0)
    with pytest.raises(EspalierError, match="there is no room"):
        other.offer()
    (lock,) = (tmp_path / "state" / "models").glob("*/lock")
    os.utime(lock, (lock.stat().st_mtime - model_folder.ABANDONED_SECONDS - 1,) * 2)
    lacking = other.offer()
    with pytest.raises(EspalierError, match="have reserved 15000 bytes"):
        given_up.bring(1)
    for index in lacking:
        other.bring(index)
    (lock,) = (tmp_path / "state" / "models").glob("*/lock")
    os.utime(lock, (0, 0))
    # A complete model is not removed.
    with pytest.raises(EspalierError, match="there is no room"):
        given_up.offer()
    assert (other.brought() / "model.safetensors").exists()


def test_damaged_reservation_still_counts(tmp_path: Path) -> None:
    """A damaged reservation still counts with the size of the files on disk."""
    first, second = (Server(tmp_path, str(n), of(n, 12_000)) for n in range(2))
    for index in first.offer():
        first.bring(index)
    (note,) = (tmp_path / "state" / "models").glob(f"*/{model_folder.RESERVED}")
    for text in ("{", "[]", json.dumps({"bytes": "x"}), "[" * 10_000):
        note.write_text(text)
        with pytest.raises(EspalierError, match="reserved 12000 bytes"):
            second.offer()


def test_file_without_weights_is_bounded_in_size(tmp_path: Path) -> None:
    large = {
        "names": ["tokenizer.json"],
        "sizes": [(1 << 27) + 1],
        "piece_bytes": 1 << 28,
        "piece_sha256": ["0" * 64],
    }
    server = Server(tmp_path, "a", of(1, 1000), **{"max-model-bytes": 1 << 40})
    server.offered = server.offered.model_copy(update=large)
    with pytest.raises(EspalierError, match="a file without weights has more than"):
        server.offer()
