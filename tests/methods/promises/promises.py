"""Promises of every method (docs/design.md, "Promises").

To test a method, subclass ``Promises`` and define the method's settings.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.errors import EspalierError
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import Header, MessageBody
from espalier.messages.records import address, num_bytes, read, write
from espalier.messages.reply_estimate import outlook
from espalier.messages.tensor_blobs import TensorSpec, pack_tensors, unpack_tensors
from espalier.results.run_status import run_status
from espalier.settings.run import parse
from espalier.storage.hash_chain import chain_check
from server_app.estimate.messages.traffic import RunTraffic
from server_app.public_tests import public_tests
from strategies.base.checkpoint import CheckpointFolder
from strategies.base.rounds import RunFailed
from tests.bench import (
    EVALUATED,
    Bench,
    Home,
    Killed,
    events,
    home,
    model_files,
    private_text,
    results,
    summary,
)
from tests.in_process import InProcessGrid
from tests.methods.promises.full_disk import FullDisk
from tests.methods.promises.spoiled_replies import SPOILS, spoiled
from tests.methods.promises.unexpected_orders import unexpected_orders


def outgoing_bytes(reply: Message) -> bytes:
    """Return every name and value of a reply as bytes."""
    parts = []
    for key, record in reply.content.items():
        parts.append(str(key).encode())
        for name, value in record.items():
            data = value.data if isinstance(value, Array) else repr(value).encode()
            parts += [str(name).encode(), data]
    return b"\x00".join(parts)


def assert_nothing_private(data: bytes, text: str, tokenizer: Any) -> None:
    """Assert that the data contain neither the text nor runs of its token IDs.

    Token IDs are searched in several integer widths and as decimal text.
    """
    raw = text.encode()
    for start in range(0, len(raw) - 12, 7):
        assert raw[start : start + 12] not in data
    tokens = tokenizer(text)["input_ids"]
    for width in ("<u2", "<i4", "<i8"):
        for start in range(0, len(tokens) - 6, 3):
            assert np.array(tokens[start : start + 6]).astype(width).tobytes() not in data
    assert str(tokens[10:14])[1:-1].encode() not in data


def held_out(passage: str) -> bool:
    """Apply the documented rule: the SHA-256 of a passage's words modulo 100 is below 10.

    Only the first 8 bytes of the digest count.
    """
    digest = hashlib.sha256(" ".join(passage.split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < 10


def count_zeros(pruned: torch.nn.Module, dense: torch.nn.Module) -> dict[str, int]:
    """Return the number of zeros per block linear that the dense model does not have."""
    before = dict(dense.named_parameters())
    return {
        name: int(((value == 0) & (before[name] != 0)).sum())
        for name, value in pruned.named_parameters()
        if ".layers." in name and value.dim() == 2
    }


def ledger_sums(folder: Path) -> dict[int, dict[tuple[int, str], tuple[int, int]]]:
    """Return bytes (down, up) by client, then by round and message kind, from the ledger."""
    found: dict[int, dict[tuple[int, str], tuple[int, int]]] = {}
    for entry in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()):
        # This entry records a duration and not a message.
        if entry["direction"] is None:
            continue
        own = found.setdefault(entry["client"], {})
        down, up = own.get(key := (entry["round"], entry["kind"]), (0, 0))
        size = entry["wire_bytes"]
        own[key] = (down + size, up) if entry["direction"] == "down" else (down, up + size)
    return found


def third_order_of(server_round: int) -> Callable[[Header], bool]:
    """Match the third client's training request of a round; for ``Bench.killed``."""
    return lambda header: (
        (header.kind, header.server_round, header.client)
        == (
            "train",
            server_round,
            2,
        )
    )


ALL_FIGURES = EVALUATED | {"evaluation.max-samples": 0}


def silent_after_enrolment(request: Message, reply: Message) -> Message | None:
    """Drop every reply after enrolment (a tamper of ``InProcessGrid``)."""
    return reply if read(request.content).header.kind == "enrol" else None


@dataclass(frozen=True, repr=False)
class Uninterrupted:
    """Run that several tests read and none changes."""

    bench: Bench
    folder: Path
    requests: list[Message]
    received: list[tuple[int, Message]]
    """Pairs (partition, reply)."""
    printed: str


def assert_own_figures(folder: Path, bench: Bench) -> None:
    """Assert that a run's own-text metrics are those of models loaded by plain transformers.

    The held-out passages are found here by their hashes.
    """
    models = {"dense": bench.model, "federated": folder / "model"}
    loaded = {
        name: AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=True
        )
        for name, path in models.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    document = summary(folder)
    expected = {name: list[float]() for name in models}
    for client in range(bench.num_clients):
        passages = [passage for passage in private_text(client).split("\n\n") if held_out(passage)]
        tokens = torch.tensor(tokenizer("\n\n".join(passages))["input_ids"])
        samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
        metrics = document["clients"][client]["metrics"]
        assert len(samples) > 0
        for name, model in loaded.items():
            with torch.no_grad():
                losses = [
                    model(input_ids=sample[None], labels=sample[None]).loss.item()
                    for sample in samples
                ]
            expected[name].append(float(np.exp(np.mean(losses))))
            assert metrics[f"perplexity/own-text/{name}"] == pytest.approx(
                expected[name][-1], rel=1e-3
            )
    (own,) = [metric for metric in document["metrics"] if metric["dataset"] == "own-text"]
    # No single party has the clients' own text, so there is no centralized value.
    assert own["values"]["centralized"] is None
    for name, values in expected.items():
        assert own["values"][name] == pytest.approx(np.mean(values), rel=1e-3)


def assert_planned(bench: Bench, folder: Path, *, exactly: bool = False, **changes: Any) -> None:
    """Assert that the plan of a run contains its bytes.

    The plan is compared exactly, or as lower and upper bounds if it leaves something open.
    """
    settings = parse(bench.config(**changes))
    model = OpenedModel(bench.model)
    planned = RunTraffic(settings, model, public_tests(settings, model))
    measured = ledger_sums(folder)
    for client in range(bench.num_clients):
        least = planned.by_kind(client, "least")
        most = planned.by_kind(client, "most")
        if exactly or not planned.open_questions:
            assert measured[client] == {key: (one.down, one.up) for key, one in most.items()}
        for direction in (0, 1):
            sums = [
                sum((one.down, one.up)[direction] for one in case.values())
                for case in (least, most)
            ]
            assert sums[0] <= sum(pair[direction] for pair in measured[client].values()) <= sums[1]


class Federations:
    """Federations of one method, and runs that several tests read."""

    method: str
    settings: dict[str, Any]
    last_round: int
    """Round after which the killed run is killed; work must be left to do."""
    result_round: int = 0
    """First round in which a ``deliver`` carries the result.

    A ``deliver`` of an earlier round carries what the next round needs.
    """

    planned_exactly = False
    """True if these runs have the largest number of bytes of the plan."""

    cuts_samples: str
    """Name of the function that cuts the text of the method's clients."""

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Home:
        """Create the model and the evaluation text of all runs of the class."""
        return home(tmp_path_factory.mktemp("home"))

    @pytest.fixture
    def bench(self, tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
        # The minimum for real sites is larger than the texts of the bench.
        monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
        return Bench(tmp_path, self.method, self.settings, home=home)

    @pytest.fixture
    def evaluated(self, bench: Bench) -> Bench:
        """Return a bench that makes all comparisons, on the whole evaluation text."""
        return replace(bench, settings=bench.settings | ALL_FIGURES)

    @pytest.fixture
    def on_own_text(self, bench: Bench) -> Bench:
        """Return a bench that evaluates on the clients' own text and makes no other comparison."""
        return replace(bench, settings=bench.settings | {"evaluation.own-text": True})

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> "Uninterrupted":
        """Execute one undisturbed run."""
        return cls._uninterrupted(tmp_path_factory.mktemp("plain"), home, {})

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> "Uninterrupted":
        """Execute one undisturbed run with all metrics."""
        return cls._uninterrupted(tmp_path_factory.mktemp("whole"), home, ALL_FIGURES)

    @pytest.fixture(scope="class")
    @classmethod
    def without_client_2(
        cls, home: Home, tmp_path_factory: pytest.TempPathFactory
    ) -> "Uninterrupted":
        """Execute a run whose third client is silent after enrolment."""
        return cls._uninterrupted(tmp_path_factory.mktemp("without"), home, {}, silent=2)

    @classmethod
    def _uninterrupted(
        cls, folder: Path, home: Home, changes: dict[str, Any], silent: int | None = None
    ) -> "Uninterrupted":
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
            monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
            bench = Bench(folder, cls.method, cls.settings | changes, home=home)
            requests = list[Message]()
            grid = bench.grid()
            grid.before_push = requests.append
            if silent is not None:
                grid.tamper[silent] = silent_after_enrolment
            with redirect_stdout(StringIO()) as printed:
                folder = bench.run(grid)
            return Uninterrupted(bench, folder, requests, grid.received, printed.getvalue())

    def model_of_clients(self, run: Uninterrupted) -> Path:
        """Return the directory of the model that clients work on."""
        return run.bench.model


class Promises(Federations):
    """Promises of a method, one subclass per method.

    Tests that need no run of their own read one of the class's runs.
    """

    # ----- contract -------------------------------------------------------------------------------

    def test_every_message_matches_its_contract(self, whole: Uninterrupted) -> None:
        settings = parse(whole.bench.config())
        plan = OpenedModel(self.model_of_clients(whole)).plan
        assert len(whole.requests) == len(whole.received) > whole.bench.num_clients
        for request, (_, reply) in zip(whole.requests, whole.received, strict=True):
            asked = read(request.content)
            contract = contract_for(asked, lambda: plan, settings)
            check(asked, contract.down)
            check_reply(read(reply.content), asked, contract)
            assert contract.observer
        kinds = {read(request.content).header.kind for request in whole.requests}
        assert ("alone" in kinds) == settings.job.has_local_baseline

    def test_every_reply_is_in_the_egress_log(self, whole: Uninterrupted) -> None:
        for client in range(whole.bench.num_clients):
            log = (
                (whole.folder / "egress" / f"egress-node-{client:05d}.jsonl")
                .read_text()
                .splitlines()
            )
            replies = [
                read(reply.content) for partition, reply in whole.received if partition == client
            ]
            assert [json.loads(line)["kind"] for line in log] == [
                reply.header.kind for reply in replies
            ]
            for line, reply in zip(log, replies, strict=True):
                assert [blob["bytes"] for blob in json.loads(line)["blobs"]] == [
                    len(reply.blobs[k]) for k in sorted(reply.blobs)
                ]

    def test_every_egress_log_is_a_whole_chain(self, whole: Uninterrupted) -> None:
        for client in range(whole.bench.num_clients):
            checked = chain_check(whole.folder / "egress" / f"egress-node-{client:05d}.jsonl")
            received = [reply for partition, reply in whole.received if partition == client]
            assert (checked.fault, checked.entries) == ("", len(received))
            assert checked.num_bytes == sum(num_bytes(reply.content) for reply in received)

    def test_announced_replies_equal_those_sent(self, whole: Uninterrupted) -> None:
        """Logged tensors are those of the outlook, tensor by tensor.

        If the server chooses sizes, a reply is not larger than the outlook, and the largest size
        occurs.
        """
        settings = parse(whole.bench.config())
        plan = OpenedModel(self.model_of_clients(whole)).plan
        expected = outlook(plan, settings)
        reached = set[bool]()
        sent = {"fetch": "train"}
        answers = {(answer.kind, answer.server_round): answer for answer in expected.answers}
        for client in range(whole.bench.num_clients):
            log = (
                (whole.folder / "egress" / f"egress-node-{client:05d}.jsonl")
                .read_text()
                .splitlines()
            )
            found: dict[Any, dict[str, Any]] = {}
            for entry in map(json.loads, log):
                answer = answers.get((sent.get(entry["kind"], entry["kind"]), entry["round"]))
                if answer is None:
                    assert (entry["kind"], entry["blobs"], entry["fields"]) == ("deliver", [], [])
                    continue
                if entry["kind"] != "fetch" and entry["fields"]:
                    assert entry["fields"] == sorted(answer.fields)
                tensors = {
                    (blob["name"], name): spec
                    for blob in entry["blobs"]
                    for name, spec in blob["tensors"].items()
                }
                found.setdefault((answer.kind, answer.server_round), {}).update(tensors)
            for place, answer in answers.items():
                specs = {
                    (key, name): spec
                    for key, blob in (answer.specs or {}).items()
                    for name, spec in blob.items()
                }
                logged = {
                    key: TensorSpec(spec["dtype"], tuple(spec["shape"]))
                    for key, spec in found.get(place, {}).items()
                }
                if not expected.varies:
                    assert logged == specs
                assert logged.keys() <= specs.keys()
                assert {key: spec.dtype for key, spec in logged.items()}.items() <= {
                    k: s.dtype for k, s in specs.items()
                }.items()
                num_bytes_logged = sum(spec.num_bytes for spec in logged.values())
                assert num_bytes_logged <= answer.num_bytes
                reached.add(num_bytes_logged == answer.num_bytes > 0)
        assert expected.is_known
        assert True in reached

    # ----- plan -----------------------------------------------------------------------------------

    def test_the_plan_has_the_bytes_of_the_run(self, whole: Uninterrupted) -> None:
        """The bytes match for every client, round and message kind.

        If the plan leaves something open, they lie between its lower and upper bound.
        """
        assert_planned(whole.bench, whole.folder, exactly=self.planned_exactly)

    # ----- privacy --------------------------------------------------------------------------------

    def test_nothing_private_in_any_outgoing_byte(self, whole: Uninterrupted) -> None:
        tokenizer = AutoTokenizer.from_pretrained(whole.bench.model)
        for partition, reply in whole.received:
            assert_nothing_private(outgoing_bytes(reply), private_text(partition), tokenizer)

    # ----- inputs that the model cannot take ------------------------------------------------------

    def test_overlong_windows_are_refused_early(self, bench: Bench) -> None:
        with pytest.raises(
            EspalierError,
            match=r"data.sequence-length = 65: the model has 64 positions .*; set it to 64 or less",
        ):
            bench.run(data__sequence_length=65)
        assert not (bench.folder / "runs").exists()

    def test_site_with_fewer_positions_is_refused(self, bench: Bench) -> None:
        """The site's weights have the server's hash; only its ``config.json`` differs."""
        other = Path(shutil.copytree(bench.model, bench.folder / "other"))
        config = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": 15}
        (other / "config.json").write_text(json.dumps(config))
        grid = bench.grid()
        (site,) = [
            context
            for context in grid.contexts.values()
            if context.node_config["partition-id"] == 2
        ]
        site.node_config["model-path"] = str(other)
        document = summary(bench.run(grid))
        assert [client["site"] for client in document["clients"]] == [
            "node-00000",
            "node-00001",
            "node-00003",
        ]
        (reason,) = document["refused"].values()
        assert "data.sequence-length = 16: the model has 15 positions" in reason

    def test_an_unexpected_error_tells_its_type_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The message of the error contains private text, and only its type may leave.
        def fail(*_: object, **__: object) -> None:
            raise IndexError(private_text(0)[:200])

        monkeypatch.setattr(f"espalier.data.client_text.{self.cuts_samples}", fail)
        grid = bench.grid()
        with pytest.raises(RunFailed, match="unexpected IndexError"):
            bench.run(grid)
        for partition, reply in grid.received:
            assert_nothing_private(
                outgoing_bytes(reply),
                private_text(partition),
                AutoTokenizer.from_pretrained(bench.model),
            )

    def test_unexpected_handler_output_is_held_back(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from client_app.app import job_of

        honest = job_of(self.method).train

        # The reply has a field that the contract does not know.
        def chatty(site: Any, request: Any) -> Any:
            body = honest(site, request)
            body.fields["note"] = private_text(0)[:80]
            return body

        monkeypatch.setattr(job_of(self.method), "train", chatty)
        grid = bench.grid()
        with pytest.raises(RunFailed, match="egress"):
            bench.run(grid)
        assert not any(
            private_text(0)[:30].encode() in outgoing_bytes(reply) for _, reply in grid.received
        )

    # ----- repeatability --------------------------------------------------------------------------

    def test_same_seed_gives_same_bytes(self, bench: Bench, plain: Uninterrupted) -> None:
        """The first run has activations in memory and a model that stays loaded.

        The second has activations on disk and loads the model for each message.
        """
        grid = bench.grid(activations="disk")
        grid.held = {0: 9, 1: 3, 2: 6}
        for context in grid.contexts.values():
            context.node_config["keep-model"] = False
        again = bench.run(grid, activations="disk")
        assert results(again) == results(plain.folder)
        assert summary(again) == summary(plain.folder)

    def test_killed_and_resumed_equals_never_killed(
        self, evaluated: Bench, whole: Uninterrupted
    ) -> None:
        """The comparison includes all metrics; replies arrive in another order."""
        folder = evaluated.killed(
            lambda header: header.server_round >= self.last_round + (header.kind != "evaluate"),
        )
        assert summary(folder)["status"] == "failed"
        rest = evaluated.grid()
        rest.held = {0: 9, 1: 3, 2: 6}
        resumed = evaluated.run(rest, resume_from=str(folder), deadline_seconds=7.0)
        assert resumed == folder
        assert results(resumed) == results(whole.folder)
        assert summary(resumed) == summary(whole.folder)

    def test_early_killed_run_keeps_its_settings(self, bench: Bench, plain: Uninterrupted) -> None:
        """Clients hold results of the old settings.

        A resumption must not mix them with results of other settings.
        """
        folder = bench.killed(lambda header: (header.kind, header.client) == ("train", 2))
        with pytest.raises(EspalierError, match="seed was 0, is 7"):
            bench.run(bench.grid(seed=7), seed=7, resume_from=str(folder))
        assert json.loads((folder / "summary.json").read_text())["seed"] == 0
        resumed = bench.run(bench.grid(), resume_from=str(folder))
        assert results(resumed) == results(plain.folder)

    def test_killed_run_counts_as_interrupted(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def vanish(*_: object, **__: object) -> None:
            raise Killed

        grid = bench.grid()
        grid.before_push = vanish
        # A SIGKILL leaves no time to note the end.
        monkeypatch.setattr("server_app.app._note_end", vanish)
        with pytest.raises(Killed):
            bench.run(grid)
        (folder,) = (bench.folder / "runs").iterdir()
        document = json.loads((folder / "summary.json").read_text())
        # No process was left to change the status.
        assert document["status"] == "running"
        assert run_status(folder)[0] == "interrupted"
        assert (document["finished"], document["missing"]) == (None, [])

    def test_full_disk_at_checkpoint_loses_no_round(
        self, bench: Bench, plain: Uninterrupted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with FullDisk("/runs/", monkeypatch) as disk:
            save = CheckpointFolder.save

            def save_on_full_disk(folder: CheckpointFolder, server_round: int, *state: Any) -> None:
                # From the checkpoint of the last round on, nothing can be written any more.
                disk.full = disk.full or server_round == self.last_round
                save(folder, server_round, *state)

            monkeypatch.setattr(CheckpointFolder, "save", save_on_full_disk)
            with pytest.raises(
                EspalierError,
                match=r"cannot write .*checkpoint/state.json: No space left on device",
            ):
                bench.run()
        monkeypatch.setattr(CheckpointFolder, "save", save)
        (folder,) = (bench.folder / "runs").iterdir()
        # The full disk had no room for another status.
        assert run_status(folder)[0] == "interrupted"
        finished = folder / "checkpoint" / "state.json"
        assert (
            json.loads(finished.read_text())["round"] if finished.exists() else 0
        ) == self.last_round - 1
        resumed = bench.run(bench.grid(), resume_from=str(folder))
        assert results(resumed) == results(plain.folder)
        assert summary(resumed) == summary(plain.folder)

    def test_full_server_disk_drops_no_client(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grid = bench.grid()
        with FullDisk("/runs/", monkeypatch) as disk:

            def fill(message: Message) -> None:
                disk.full = disk.full or read(message.content).header.kind == "train"

            grid.before_push = fill
            with pytest.raises(OSError, match="No space left on device"):
                bench.run(grid)
        (folder,) = (bench.folder / "runs").iterdir()
        assert not [event for event in events(folder) if event["event"] == "dropped"]

    def test_full_site_disk_drops_that_site_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with FullDisk("/node-00002/", monkeypatch) as disk:
            disk.full = True
            clients = summary(bench.run())["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "completed",
            "dropped",
            "completed",
        ]
        assert "No space left on device" in clients[2]["reason"]

    # ----- failures -------------------------------------------------------------------------------

    def test_one_client_dead_the_round_still_ends(self, without_client_2: Uninterrupted) -> None:
        document = summary(without_client_2.folder)
        assert document["status"] == "completed"
        assert [client["status"] for client in document["clients"]] == [
            "completed",
            "completed",
            "dropped",
            "completed",
        ]
        assert "no reply before the deadline (2 of 2 attempts)" in document["clients"][2]["reason"]

    def test_a_lost_message_is_sent_again(self, bench: Bench, plain: Uninterrupted) -> None:
        grid = bench.grid()
        lost = []

        def lose_the_first(request: Message, reply: Message) -> Message | None:
            if read(request.content).header.kind == "train" and not lost:
                return lost.append(reply)
            return reply

        grid.tamper[2] = lose_the_first
        folder = bench.run(grid)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        assert model_files(folder) == model_files(plain.folder)

    @pytest.mark.parametrize("spoil", sorted(SPOILS))
    def test_a_malformed_reply_is_refused(self, plain: Uninterrupted, spoil: str) -> None:
        settings = parse(plain.bench.config())
        model = OpenedModel(self.model_of_clients(plain))
        pairs = zip(plain.requests, plain.received, strict=True)
        request, reply = next(
            (r, a)
            for r, (client, a) in pairs
            if client == 2 and read(r.content).header.kind == "train"
        )
        asked = read(request.content)
        # Spoil a copy, because other tests read the same run.
        copied = Message(write(read(reply.content)), reply_to=request)
        contract = contract_for(asked, lambda: model.plan, settings)
        # The copy itself satisfies the contract, so that the spoiled part is the reason.
        check_reply(read(copied.content), asked, contract)
        with pytest.raises(EspalierError):
            check_reply(read(SPOILS[spoil](copied).content), asked, contract)

    def test_a_malformed_reply_costs_its_sender_alone(
        self, bench: Bench, without_client_2: Uninterrupted
    ) -> None:
        grid = bench.grid()
        grid.tamper[2] = spoiled(SPOILS["garbage"])
        folder = bench.run(grid)
        statuses = {client["client"]: client["status"] for client in summary(folder)["clients"]}
        assert statuses == {0: "completed", 1: "completed", 2: "dropped", 3: "completed"}
        assert model_files(folder) == model_files(without_client_2.folder)
        assert any(event["event"] == "dropped" and event["client"] == 2 for event in events(folder))

    def test_run_without_quorum_ends_with_reasons(self, bench: Bench) -> None:
        grid = bench.grid()
        for client in (0, 1, 3):
            grid.tamper[client] = spoiled(SPOILS["garbage"])
        with pytest.raises(RunFailed, match="the quorum is 2 of num-clients = 4"):
            bench.run(grid)
        (folder,) = (bench.folder / "runs").iterdir()
        document = summary(folder)
        assert document["status"] == "failed"
        assert document["reason"].count("reply refused") == 3

    # ----- unexpected orders ----------------------------------------------------------------------

    def test_wrong_order_is_answered_in_words(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Orders that lack something are sent before each request of client 0.

        They go to copies of its state and to a client without state.
        """
        changes = {"evaluation__local_baseline": True}
        grid = bench.grid(**changes)
        seen = dict[tuple[Any, ...], MessageBody]()
        wrong = list[str]()
        copies = bench.folder / "copies"
        state = bench.folder / "state"

        def ask(name: str, body: MessageBody, kept: bool) -> None:
            with monkeypatch.context() as patched:
                patched.setenv("ESPALIER_STATE_DIR", str(copies))
                if kept:
                    shutil.copytree(state, copies)
                node, context = next(iter(grid.contexts.items()))
                reply = read(grid.answer(address(body, node, 60.0), context).content)
                shutil.rmtree(copies, ignore_errors=True)
            reason = str(reply.fields.get("reason", ""))
            if "unexpected" in reason:
                wrong.append(
                    f"{body.header.kind} of round {body.header.server_round} {name}: {reason}"
                )

        def before(message: Message) -> None:
            body = read(message.content)
            header = body.header
            place = header.kind, header.server_round, header.part, body.fields.get("what")
            if header.client != 0 or place in seen:
                return
            ask("without state", body, kept=False)
            for name, other in unexpected_orders(body, list(seen.values())[-2:]):
                ask(name, other, kept=True)
            seen[place] = body

        grid.before_push = before
        bench.run(grid, **changes)
        assert len(seen) >= 2
        assert wrong == [], wrong

    # ----- one answer per round -------------------------------------------------------------------

    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return other orders of the same round that the contract allows: with reversed tensors."""
        if not order.blobs:
            return []
        found = {key: unpack_tensors(blob) for key, blob in order.blobs.items()}
        turned = {
            key: pack_tensors({n: v[::-1].copy() for n, v in arrays.items()})
            for key, arrays in found.items()
        }
        return [MessageBody(order.header, order.fields, turned)]

    def test_a_round_is_answered_once(self, bench: Bench) -> None:
        """A repeated order gets the same reply.

        Other orders, and repeated orders of rounds without a stored reply, fail.
        """
        grid = bench.grid(evaluation__local_baseline=True)
        orders = dict[int, MessageBody]()
        later = list[MessageBody]()

        def note(message: Message) -> None:
            body = read(message.content)
            if body.header.kind in ("alone", "evaluate"):
                later.append(body)
                raise Killed
            if body.header.kind == "train" and body.header.client == 0:
                orders[body.header.server_round] = body

        grid.before_push = note
        with pytest.raises(Killed):
            bench.run(grid, evaluation__local_baseline=True)
        replies = [read(reply.content) for partition, reply in grid.received if partition == 0]
        first = {
            reply.header.server_round: reply for reply in replies if reply.header.kind == "train"
        }

        def ask(order: MessageBody, **header: Any) -> MessageBody:
            body = MessageBody(order.header.model_copy(update=header), order.fields, order.blobs)
            node, context = next(iter(grid.contexts.items()))
            return read(grid.answer(address(body, node, 60.0), context).content)

        last = max(orders)
        again = ask(orders[last], attempt=2)
        assert (again.fields, again.blobs) == (first[last].fields, first[last].blobs)
        for order in (other for number in orders for other in self.other_orders(orders[number])):
            words = (
                "another request of round"
                if order.header.server_round == last
                else f"answered round {last}; round"
            )
            assert words in ask(order).fields["reason"]
        for number in set(orders) - {last}:
            # A client keeps the replies of the last two rounds.
            if number == last - 1:
                assert ask(orders[number]).blobs == first[number].blobs
                shutil.rmtree(
                    bench.folder
                    / "state"
                    / orders[number].header.lineage
                    / "node-00000"
                    / f"r{number:03d}"
                )
            assert (
                ask(orders[number])
                .fields["reason"]
                .endswith(f"round {number} is over; start a new run")
            )
        shutil.rmtree(
            bench.folder / "state" / orders[last].header.lineage / "node-00000" / f"r{last:03d}"
        )
        # The client may or may not repeat the work, but it must not report other data or lost
        # state.
        anew = ask(orders[last])
        assert anew.blobs in (first[last].blobs, {})
        assert not anew.fields.get("lost")
        for body in (orders[last], *later):
            assert (
                "of round 5000 does not exist, the run ends with"
                in ask(body, server_round=5000, client=0).fields["reason"]
            )

    # ----- result ---------------------------------------------------------------------------------

    def test_exported_model_has_reported_perplexity(self, whole: Uninterrupted) -> None:
        text = whole.bench.public
        folder = whole.folder
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, trust_remote_code=True
        )
        tokens = torch.tensor(
            AutoTokenizer.from_pretrained(folder / "model")(text.read_text())["input_ids"]
        )
        samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
        with torch.no_grad():
            losses = [
                model(input_ids=sample[None], labels=sample[None]).loss.item() for sample in samples
            ]
        metric, _ = summary(folder)["metrics"]
        assert metric["values"]["federated"] == pytest.approx(
            float(np.exp(np.mean(losses))), rel=1e-4
        )

    def test_own_text_figures_equal_transformers(self, whole: Uninterrupted) -> None:
        assert_own_figures(whole.folder, whole.bench)

    def test_nothing_is_delivered_without_own_text(self, bench: Bench) -> None:
        grid = bench.grid(evaluation__local_baseline=True)
        folder = bench.run(grid, evaluation__local_baseline=True)
        replies = [read(reply.content) for _, reply in grid.received]
        kinds = [reply.header.kind for reply in replies]
        # Some methods need a deliver between rounds.
        after = replies[len(kinds) - kinds[::-1].index("train") :]
        brought = [reply.header.server_round for reply in after if reply.header.kind == "deliver"]
        # Pushes before ``result_round`` serve the client's own result.
        assert all(server_round < self.result_round for server_round in brought)
        assert all(
            reply.fields["own_losses"] == [] for reply in replies if reply.header.kind == "evaluate"
        )
        assert [metric["dataset"] for metric in summary(folder)["metrics"]] == ["public"]

    def test_too_little_own_text_is_told_early(self, on_own_text: Bench) -> None:
        held_back = [passage for passage in private_text(1).split("\n\n") if not held_out(passage)]
        (on_own_text.folder / "text-1.txt").write_text("\n\n".join(held_back))
        client = summary(on_own_text.run())["clients"][1]
        assert client["status"] == "dropped"
        assert client["reason"].startswith(
            "train: evaluation.own-text: the client's held-out text has fewer than"
        )

    def test_a_mean_over_few_words_never_leaves(
        self, on_own_text: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 1000)
        with pytest.raises(
            RunFailed,
            match="gives fewer than 1000 predictions, and their mean would reveal too much",
        ):
            on_own_text.run()

    def model_at_a_site(self, bench: Bench) -> dict[str, Any]:
        """Return the settings of a node for the model that a real site uses."""
        return {"model-path": str(bench.model)}

    def test_site_may_refuse_own_text_evaluation(self, on_own_text: Bench) -> None:
        grid = on_own_text.grid()
        for client, context in enumerate(grid.contexts.values()):
            context.node_config |= {
                "site": f"site-{client}",
                "own-text": client != 1,
                "min-tokens": 30,
                **self.model_at_a_site(on_own_text),
            }
        grid.simulated = False
        document = summary(on_own_text.run(grid))
        assert "this site does not allow it" in document["refused"]["site-1"]
        clients = {client["site"]: client["status"] for client in document["clients"]}
        assert clients == {f"site-{client}": "completed" for client in (0, 2, 3)}

    def test_undelivered_result_costs_figures_alone(self, on_own_text: Bench) -> None:
        def refuse(request: Message, reply: Message) -> Message | None:
            header = read(request.content).header
            return (
                None
                if header.kind == "deliver" and header.server_round >= self.result_round
                else reply
            )

        grid = on_own_text.grid()
        grid.tamper[2] = refuse
        document = summary(on_own_text.run(grid))
        assert document["status"] == "completed"
        given = [
            "perplexity/own-text/federated" in client["metrics"] for client in document["clients"]
        ]
        assert given == [True, True, False, True]
        assert document["clients"][2]["reason"].startswith("deliver: no reply before the deadline")
        # The client's votes are part of the model.
        assert document["clients"][2]["status"] == "completed"

    def test_finished_simulation_leaves_no_state(self, whole: Uninterrupted) -> None:
        lineage = json.loads((whole.folder / "run.json").read_text())["lineage"]
        assert not list((whole.bench.folder / "state").rglob(f"*{lineage}*"))


class PruningPromises(Promises):
    """Promises of methods that set weights to zero."""

    cuts_samples = "calibration_samples"

    def expected_sparsity(self, model: OpenedModel) -> float:
        """Return the sparsity that the settings demand, computed by hand."""
        raise NotImplementedError

    def test_exact_sparsity(self, plain: Uninterrupted) -> None:
        folder = plain.folder
        bench = plain.bench
        expected = self.expected_sparsity(OpenedModel(bench.model))
        assert summary(folder)["sparsity"]["achieved"] == pytest.approx(expected, abs=1e-12)
        written, dense = (
            AutoModelForCausalLM.from_pretrained(path) for path in (folder / "model", bench.model)
        )
        zeros = sum(count_zeros(written, dense).values())
        assert zeros / OpenedModel(bench.model).plan.num_weights == pytest.approx(
            expected, abs=1e-12
        )


__all__ = ["InProcessGrid", "Promises", "PruningPromises"]
