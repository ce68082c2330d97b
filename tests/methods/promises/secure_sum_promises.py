"""Promises of methods whose clients' tensors are summed secretly (``federation.secure-sum``).

To test a method, subclass ``SecureSumPromises`` and define the method's settings.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from espalier.messages.message import Header
from espalier.messages.records import read
from espalier.messages.tensor_blobs import views
from strategies.base.rounds import RunFailed
from tests.bench import Bench, Home, model_files, results, summary
from tests.in_process import Tamper
from tests.methods.promises.contracts import assert_planned, outgoing_bytes
from tests.methods.promises.federations import Federations, Uninterrupted

SECURE = {"federation.secure-sum": True}
STEPS = ("train", "shares", "masked", "confirm", "unmask")
UNMASKING = ("confirm", "unmask")
"""Steps after the masked sum is complete."""
PIECE = 16
"""Size in bytes of the pieces of a client's tensors that are searched for."""


def silent_from(kind: str) -> Tamper:
    """Return a tamper that drops every reply of a client from a kind of message on."""
    gone = []

    def drop(request: Message, reply: Message) -> Message | None:
        header = read(request.content).header
        if header.kind == kind or gone:
            gone.append(header)
            return None
        return reply

    return drop


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield pieces of a tensor's bytes that are unlikely to occur by chance."""
    for start in range(0, len(data) - PIECE + 1, 8):
        piece = data[start : start + PIECE]
        if len(set(piece)) >= PIECE // 2:
            yield piece


class SecureSumPromises(Federations):
    """Promises of secure sums for one method, with four clients of whom three are needed."""

    @pytest.fixture(scope="class")
    @classmethod
    def secret(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
        """Execute one undisturbed run with secure sums."""
        return cls._uninterrupted(tmp_path_factory.mktemp("secret"), home, SECURE)

    @pytest.fixture
    def secure(self, bench: Bench) -> Bench:
        """Return a bench whose runs have secure sums."""
        bench.settings = bench.settings | SECURE
        return bench

    def test_results_equal_those_of_plain_sums(
        self, plain: Uninterrupted, secret: Uninterrupted
    ) -> None:
        assert model_files(secret.folder) == model_files(plain.folder)
        assert summary(secret.folder)["report"] == summary(plain.folder)["report"]
        assert not (secret.folder / "secure-sum").exists()
        assert not (secret.folder / "inbox").exists()

    def test_secret_results_do_not_depend_on_order_or_chance(
        self, secure: Bench, secret: Uninterrupted
    ) -> None:
        grid = secure.grid()
        grid.held = {0: 3, 1: 1}
        assert model_files(secure.run(grid)) == model_files(secret.folder)

    def test_plan_has_the_bytes_of_the_run(self, secret: Uninterrupted) -> None:
        assert_planned(secret.bench, secret.folder, exactly=self.planned_exactly)

    def test_no_tensor_of_a_client_reaches_the_server(self, secure: Bench) -> None:
        """Search files, requests and replies for pieces and hashes of each client's tensors."""
        grid = secure.grid()
        plain = dict[str, bytes]()
        files = dict[Path, bytes]()

        def look(message: Message) -> None:
            for blob in (secure.folder / "state").glob("*/*/r*/*"):
                data = blob.read_bytes()
                if not blob.name.endswith(".json"):
                    plain[hashlib.sha256(data).hexdigest()] = data
            for file in (secure.folder / "runs").rglob("*"):
                if file.is_file() and "egress" not in file.parts:
                    files[file] = files.get(file, b"") + file.read_bytes()
            files[Path("requests")] = files.get(Path("requests"), b"") + outgoing_bytes(message)

        # What the server pushes back is known to it.
        grid.before_push = look
        folder = secure.run(grid)
        seen = [*files.values(), *map(outgoing_bytes, (reply for _, reply in grid.received))]
        seen += [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
        pushed = [key for key, data in plain.items() if any(data in other for other in seen)]
        own = {key: data for key, data in plain.items() if key not in pushed}
        haystack = b"\x00\x01\x02".join(seen)
        assert len(own) >= secure.num_clients
        searched = 0
        for key, data in own.items():
            assert key.encode() not in haystack
            for values in views(data).values():
                for piece in pieces(np.ascontiguousarray(values).tobytes()):
                    assert piece not in haystack
                    searched += 1
        assert searched >= 100

    @pytest.mark.parametrize("step", STEPS)
    def test_a_client_may_drop_out_at_each_step(
        self, secure: Bench, plain: Uninterrupted, without_client_2: Uninterrupted, step: str
    ) -> None:
        """A client counts if its masked summands are complete."""
        grid = secure.grid()
        grid.tamper[2] = silent_from(step)
        folder = secure.run(grid)
        clients = summary(folder)["clients"]
        assert [client["status"] == "completed" for client in clients] == [True, True, False, True]
        assert clients[2]["reason"].startswith(f"{step}: no reply before the deadline")
        expected = plain if step in UNMASKING else without_client_2
        assert model_files(folder) == model_files(expected.folder)

    @pytest.mark.parametrize("step", STEPS)
    def test_below_the_threshold_nothing_is_unmasked(self, secure: Bench, step: str) -> None:
        grid = secure.grid()
        kinds = list[str]()
        grid.before_push = lambda message: kinds.append(read(message.content).header.kind)
        for client in (1, 2):
            grid.tamper[client] = silent_from(step)
        with (
            redirect_stdout(StringIO()),
            pytest.raises(RunFailed, match="secure sum of round 1: ") as error,
        ):
            secure.run(grid)
        assert ("unmask" in kinds) == (step == "unmask")
        assert ("stays masked" if step in UNMASKING else "nothing was unmasked") in str(error.value)
        assert str(error.value).count("no reply before the deadline") == 2

    @pytest.mark.parametrize("step", STEPS)
    def test_a_killed_run_resumes_to_the_same_bytes(
        self, secure: Bench, secret: Uninterrupted, step: str
    ) -> None:
        """Masks are never used twice: a resumed run has the same masked bytes, or other keys."""
        sent = list[tuple[str, Any]]()

        def at_second_client(header: Header) -> bool:
            return (header.kind, header.client) == (step, 1)

        first = secure.grid()
        folder = secure.killed(at_second_client, first)
        second = secure.grid()
        resumed = secure.run(second, resume_from=str(folder))
        assert results(resumed) == results(secret.folder)
        for grid in (first, second):
            bodies = [read(reply.content) for _, reply in grid.received]
            sent += [
                (hashlib.sha256(blob).hexdigest(), body.header.client)
                for body in bodies
                if body.header.kind == "masked"
                for blob in body.blobs.values()
            ]
        assert len(set(sent)) == len(sent)
        kinds = [read(reply.content).header.kind for _, reply in second.received]
        assert ("masked" in kinds) == (step not in UNMASKING)

    def test_summary_names_secure_sums(self, secret: Uninterrupted) -> None:
        run = json.loads((secret.folder / "run.json").read_text())
        assert "secure-sum = true" in (secret.folder / "settings.toml").read_text(), run
