"""Promises of methods whose clients' tensors are summed secretly (``federation.secure-sum``).

To test a method, subclass ``SecureSumPromises``, or ``RoundedSumPromises`` if means are rounded in
another way than those of plain replies, and define the method's settings. ``HiddenTensors`` has the
search for tensors in all bytes of the server.
"""

import hashlib
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from espalier.hf.opening.opened_model import open_model
from espalier.messages.message import Header
from espalier.messages.records import read, write
from espalier.messages.sums.secure_sum import summand_specs
from espalier.messages.sums.summands import clear_padding
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.settings.run import parse
from strategies.base.rounds import RunFailed
from tests.bench import Bench, Home, model_files, results, summary
from tests.in_process import Tamper
from tests.methods.promises.contracts import assert_planned
from tests.methods.promises.federations import Federations, Uninterrupted

SECURE = {"federation.secure-sum": True}
STEPS = ("train", "shares", "masked", "confirm", "unmask")
UNMASKING = ("confirm", "unmask")
"""Steps after the masked sum is complete."""


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


class SecureFederations(Federations):
    """Federations of one method with secure sums."""

    @pytest.fixture
    def secure(self, bench: Bench) -> Bench:
        """Return a bench whose runs have secure sums."""
        bench.settings = bench.settings | SECURE
        return bench


class SecureSumPromises(SecureFederations):
    """Equal results, drop-outs and resumption, with four clients of whom three are needed."""

    @pytest.fixture(scope="class")
    @classmethod
    def secret(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
        """Execute one undisturbed run with secure sums."""
        return cls._uninterrupted(tmp_path_factory.mktemp("secret"), home, SECURE)

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

    def assert_drop_out(self, secure: Bench, step: str, expected: Path) -> None:
        """Assert that a run whose third client is silent from a step on has the expected result."""
        grid = secure.grid()
        grid.tamper[2] = silent_from(step)
        folder = secure.run(grid)
        clients = summary(folder)["clients"]
        assert [client["status"] == "completed" for client in clients] == [True, True, False, True]
        assert clients[2]["reason"].startswith(f"{step}: no reply before the deadline")
        assert model_files(folder) == model_files(expected)

    @pytest.mark.parametrize("step", STEPS)
    def test_a_client_may_drop_out_at_each_step(
        self, secure: Bench, plain: Uninterrupted, without_client_2: Uninterrupted, step: str
    ) -> None:
        """A client counts if its masked summands are complete."""
        expected = plain if step in UNMASKING else without_client_2
        self.assert_drop_out(secure, step, expected.folder)

    @pytest.mark.parametrize("step", ["masked", "unmask"])
    def test_a_client_that_comes_back_keeps_one_of_its_secrets(
        self, secure: Bench, step: str
    ) -> None:
        """Its messages of one kind are lost, and it answers everything else that it is asked."""
        grid = secure.grid()
        orders = list[tuple[int, dict[str, Any]]]()

        def note(message: Message) -> None:
            body = read(message.content)
            if body.header.kind == "unmask":
                orders.append((body.header.server_round, body.fields))

        grid.before_push = note
        grid.tamper[2] = lambda request, reply: (
            None if read(request.content).header.kind == step else reply
        )
        secure.run(grid)
        # A later round has other secrets, and may have fewer clients.
        first = [fields for number, fields in orders if number == orders[0][0]]
        for fields in first:
            assert (2 in fields["included"]) == (step == "unmask")
        asked = {name: {client for fields in first for client in fields[name]}
                 for name in ("seeds_of", "keys_of")}  # fmt: skip
        assert not asked["seeds_of"] & asked["keys_of"]
        assert (2 in asked["keys_of"]) == (step == "masked")

    @pytest.mark.parametrize("high", [0, 1 << 62, 1 << 63])
    def test_wrong_summands_of_one_client_do_not_end_the_run(
        self, secure: Bench, high: int
    ) -> None:
        """Nobody sees single summands. ``high`` is added to random words (0) or to its own."""
        grid = secure.grid()
        plan, run = open_model(str(secure.model)).plan, parse(secure.config())
        random = np.random.default_rng(0)
        changed = list[str]()

        def lie(request: Message, reply: Message) -> Message:
            body = read(reply.content)
            if body.header.kind != "masked" or body.header.status == "failed":
                return reply
            specs = summand_specs(body.header.server_round, plan, run)
            for key, blob in body.blobs.items():
                tensors = {name: words.copy() for name, words in unpack_tensors(blob).items()}
                # Blocks that only a sub-model has keep their summands.
                for name in tensors.keys() & specs.get(key, {}).keys():
                    words = tensors[name]
                    words += (
                        np.uint64(high)
                        if high
                        else random.integers(1 << 63, size=words.shape, dtype=np.uint64)
                    )
                    clear_padding(words, specs[key][name])
                    changed.append(name)
                body.blobs[key] = pack_tensors(tensors)
            return Message(write(body), reply_to=request)

        grid.tamper[2] = lie
        assert summary(secure.run(grid))["status"] == "completed"
        assert changed

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
        headers = [read(reply.content).header for _, reply in second.received]
        kinds = [header.kind for header in headers if header.server_round == 1]
        assert ("masked" in kinds) == (step not in UNMASKING)

    def test_summary_names_secure_sums(self, secret: Uninterrupted) -> None:
        run = json.loads((secret.folder / "run.json").read_text())
        assert "secure-sum = true" in (secret.folder / "settings.toml").read_text(), run


class RoundedSumPromises(SecureSumPromises):
    """Promises of means that are rounded in another way than those of plain replies.

    Bytes of runs with secure sums equal each other. Metrics are those of plain sums up to
    ``tolerance``.
    """

    tolerance = 1e-4

    @pytest.fixture(scope="class")
    @classmethod
    def secret_without(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
        """Execute a run with secure sums whose third client is silent after enrolment."""
        return cls._uninterrupted(tmp_path_factory.mktemp("without"), home, SECURE, silent=2)

    def assert_equal_reports(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        """Assert that the reports of a run with secure sums and of one without are equal."""
        assert found == expected

    def test_results_equal_those_of_plain_sums(
        self, plain: Uninterrupted, secret: Uninterrupted
    ) -> None:
        one, other = (summary(run.folder) for run in (secret, plain))
        self.assert_equal_reports(one["report"], other["report"])
        assert len(one["metrics"]) == len(other["metrics"]) > 0
        for own, expected in zip(one["metrics"], other["metrics"], strict=True):
            known = {key: value for key, value in expected["values"].items() if value is not None}
            assert known
            found = {key: own["values"][key] for key in known}
            assert found == pytest.approx(known, rel=self.tolerance)

    @pytest.mark.parametrize("step", STEPS)
    def test_a_client_may_drop_out_at_each_step(
        self,
        secure: Bench,
        secret: Uninterrupted,
        secret_without: Uninterrupted,
        step: str,
    ) -> None:
        """A client counts if its masked summands are complete."""
        expected = secret if step in UNMASKING else secret_without
        self.assert_drop_out(secure, step, expected.folder)
