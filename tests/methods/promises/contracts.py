"""Promises about contracts, the plan of a run, privacy and unusable inputs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message
from transformers import AutoTokenizer

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.records import num_bytes, read
from espalier.messages.tensor_blobs import TensorSpec
from espalier.settings.run import parse
from espalier.storage.hash_chain import chain_check
from server_app.estimate.messages.replies import Answer, answers_of, outlook
from server_app.estimate.messages.traffic import RunTraffic
from server_app.public_tests import public_tests
from strategies.base.rounds import RunFailed
from tests.bench import Bench, private_text, summary
from tests.methods.promises.federations import Federations, Uninterrupted


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


def specs_of(answer: Answer | None) -> dict[tuple[str, str], TensorSpec]:
    """Return the specs of a reply's tensors by blob key and name; none if there is no reply."""
    blobs = (answer.specs if answer else None) or {}
    return {(key, name): spec for key, blob in blobs.items() for name, spec in blob.items()}


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


class ContractPromises(Federations):
    """Outgoing messages, planned bytes, private text, and texts that a model cannot take."""

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
        assert ("local_baseline" in kinds) == settings.job.has_local_baseline

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
        """Logged tensors are those of the client in the dry run, tensor by tensor.

        If the plan leaves something open, they are not larger than the outlook. The largest size
        occurs.
        """
        settings = parse(whole.bench.config())
        model = OpenedModel(whole.bench.model)
        traffic = RunTraffic(settings, model, public_tests(settings, model))
        expected = outlook(traffic)
        reached = set[bool]()
        sent = {"fetch": "train"}
        answers = {(answer.kind, answer.server_round): answer for answer in expected.answers}
        for client in range(whole.bench.num_clients):
            log = (
                (whole.folder / "egress" / f"egress-node-{client:05d}.jsonl")
                .read_text()
                .splitlines()
            )
            own = answers_of(traffic.exchanges()[client])
            found: dict[Any, dict[str, Any]] = {}
            for entry in map(json.loads, log):
                answer = answers.get((sent.get(entry["kind"], entry["kind"]), entry["round"]))
                if answer is None:
                    assert (entry["kind"], entry["blobs"], entry["fields"]) == ("push", [], [])
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
                specs = specs_of(answer)
                logged = {
                    key: TensorSpec(spec["dtype"], tuple(spec["shape"]))
                    for key, spec in found.get(place, {}).items()
                }
                if not traffic.open_questions:
                    assert logged == specs_of(own.get(place))
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
