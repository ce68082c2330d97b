"""FedPETuning: promises of every method, and averages of the clients' adapters."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.errors import EspalierError
from espalier.hf.export.model import ExportError
from espalier.hf.opening.opened import open_model
from espalier.messages.blobs.adapters import pack_adapters
from espalier.messages.ledger import Ledger
from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.records import address, read
from espalier.models.adapters import adapter_plan
from espalier.settings.tables.lora import LoraSettings
from espalier.training.initial_values import initial_adapters
from strategies.base.checkpoint import CheckpointFolder
from tests.bench import Bench, Killed, model_files, private_text, results, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Uninterrupted, silent_after_enrolment, third_order_of
from tests.methods.promises.promises import Promises, held_out
from tests.methods.tuning.adapters_sent import (
    PATHS,
    added_to_b,
    bodies,
    num_data_bytes,
    padded_mean,
    sent_adapters,
    svd_mean,
    written,
)
from tests.run_names import BY_HAND

SHAPES = {"attn.q": (16, 16), "attn.v": (8, 16)}
"""Shapes (out, in) of the adapted matrices of the bench's model, which has two blocks."""
BYTES_OF = {
    "float32": lambda numbers: 4 * numbers,
    "bfloat16": lambda numbers: 2 * numbers,
    "nf4": lambda numbers: math.ceil(numbers / 2) + 4 * math.ceil(numbers / 64),
}


def block_bytes(wire_dtype: str, lora_rank: int) -> int:
    """Return the wire bytes of one block's adapters, computed from the shapes."""
    return sum(
        BYTES_OF[wire_dtype](lora_rank * side) for shape in SHAPES.values() for side in shape
    )


def first_adapters(bench: Bench, lora_rank: int = 2) -> dict[str, dict[str, torch.Tensor]]:
    """Return the initial adapters of every run of the bench.

    B is zero; A is made from the seed by the server and every client.
    """
    opened = open_model(str(bench.model))
    return initial_adapters(
        adapter_plan(opened.plan, LoraSettings(rank=lora_rank, alpha=2.0 * lora_rank)), 0
    )


def brought(
    requests: list[Message], server_round: int
) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """Return the tensors sent to each client before a round, by blob key and name."""
    found: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    for body in (read(request.content) for request in requests):
        if body.header.kind in ("deliver", "train") and body.header.server_round == server_round:
            found.setdefault(body.header.client, {}).update(
                {key: load(blob) for key, blob in body.blobs.items()}
            )
    return found


class TestFedPETuning(Promises):
    """Federations with two rounds of a few steps on two matrices of each block."""

    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "training.steps": 2,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 2,
        "lora.alpha": 4.0,
        "lora.merge": True,
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    # ----- the average ----------------------------------------------------------------------------

    @pytest.fixture
    def uneven(self, bench: Bench) -> dict[int, float]:
        """Give clients texts of different lengths; return their numbers of training sequences."""
        samples = {}
        tokenizer = AutoTokenizer.from_pretrained(bench.model)
        for client in range(bench.num_clients):
            passages = private_text(client).split("\n\n")[: 60 - 12 * client]
            (bench.folder / f"text-{client}.txt").write_text("\n\n".join(passages))
            own = "\n\n".join(passage for passage in passages if not held_out(passage))
            samples[client] = float(len(tokenizer(own)["input_ids"]) // 16)
        return samples

    def test_factors_are_averaged_by_samples(self, bench: Bench, uneven: dict[int, float]) -> None:
        changes = {"federation__rounds": 1}
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        sent = sent_adapters(grid, 1)
        assert len(set(uneven.values())) > 2
        assert {
            client["client"]: client["metrics"]["samples"] for client in summary(folder)["clients"]
        } == uneven
        for block in (0, 1):
            for matrix in PATHS:
                for found, mean in zip(
                    written(folder, block, matrix),
                    padded_mean(sent, uneven, block, matrix, 2),
                    strict=True,
                ):
                    np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("weights", ["samples", "equal"])
    def test_updates_are_averaged_and_approximated(
        self, bench: Bench, uneven: dict[int, float], weights: str
    ) -> None:
        changes = {
            "federation__rounds": 1,
            "fedpetuning__aggregation": "svd",
            "federation__client_weights": weights,
        }
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        weight_of = uneven if weights == "samples" else dict.fromkeys(uneven, 1.0)
        for block in (0, 1):
            for matrix in PATHS:
                expected = svd_mean(sent_adapters(grid, 1), weight_of, block, matrix, 2)
                assert np.abs(expected).max() > 1e-4
                np.testing.assert_allclose(
                    np.matmul(*written(folder, block, matrix)), expected, rtol=1e-4, atol=1e-8
                )

    def test_equal_clients_give_their_common_result(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for client in range(bench.num_clients):
            (bench.folder / f"text-{client}.txt").write_text(private_text(0))
        # All clients go through their text in the same order.
        monkeypatch.setattr("client_app.methods.tuning.fedpetuning.derive_seed", lambda *_, **__: 5)
        changes = {"federation__rounds": 1}
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        sent = sent_adapters(grid, 1)
        for matrix in PATHS:
            alone = padded_mean({3: sent[3]}, {3: 1.0}, 1, matrix, 2)
            for found, expected in zip(written(folder, 1, matrix), alone, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)

    # ----- sampling -------------------------------------------------------------------------------

    SAMPLED: ClassVar[dict[str, Any]] = {
        "federation__rounds": 4,
        "federation__sampled_clients": 0.5,
        "federation__client_weights": "equal",
        "seed": 9,
    }

    def test_only_sampled_clients_train(self, bench: Bench) -> None:
        grid = bench.grid(**self.SAMPLED)
        folder = bench.run(grid, **self.SAMPLED)
        asked = [set(bodies(grid, server_round, "train")) for server_round in (1, 2, 3, 4)]
        assert [len(clients) for clients in asked] == [2, 2, 2, 2]
        assert [1 in clients for clients in asked] == [True, False, False, True]
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        mean = padded_mean(sent_adapters(grid, 4), dict.fromkeys(range(4), 1.0), 0, "attn.q", 2)
        for found, expected in zip(written(folder, 0, "attn.q"), mean, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)

    def test_lost_sampled_client_is_not_replaced(self, bench: Bench) -> None:
        """A replacement would not have the global adapters."""
        # These adapters do not fit in one part.
        changes = self.SAMPLED | {"lora__rank": 8}
        grid = bench.grid(**changes)
        lost: list[int] = []

        def lose_a_delivery(request: Message, reply: Message) -> Message | None:
            header = read(request.content).header
            if (
                header.kind == "deliver"
                and header.server_round == 2
                and (not lost or header.client in lost)
            ):
                return lost.append(header.client)
            return reply

        grid.tamper = dict.fromkeys(range(4), lose_a_delivery)
        folder = bench.run(grid, **changes)
        assert len(bodies(grid, 2, "train")) == 1
        dropped = [
            client["client"]
            for client in summary(folder)["clients"]
            if client["status"] == "dropped"
        ]
        assert dropped == [lost[0]]

    def test_site_with_fewer_positions_trains_nothing(self, bench: Bench) -> None:
        """The client is never asked to train in a round, only for its local baseline."""
        other = Path(shutil.copytree(bench.model, bench.folder / "other"))
        config = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": 15}
        (other / "config.json").write_text(json.dumps(config))
        changes = self.SAMPLED | {"federation__rounds": 1, "evaluation__local_baseline": True}
        grid = bench.grid(**changes)
        (site,) = [
            context
            for context in grid.contexts.values()
            if context.node_config["partition-id"] == 2
        ]

        def change_after_enrolment(message: Message) -> None:
            if read(message.content).header.kind != "enrol":
                site.node_config["model-path"] = str(other)

        grid.before_push = change_after_enrolment
        clients = summary(bench.run(grid, **changes))["clients"]
        assert 2 not in bodies(grid, 1, "train")
        assert [bool(client["reason"]) for client in clients] == [False, False, True, False]
        assert (
            "alone: evaluation.sequence-length = 16: the model has 15 positions"
            in clients[2]["reason"]
        )

    # ----- implausible values ---------------------------------------------------------------------

    @pytest.mark.parametrize("aggregation", ["factors", "svd"])
    def test_implausible_updates_drop_their_senders(self, bench: Bench, aggregation: str) -> None:
        changes = {"fedpetuning__aggregation": aggregation, "part_bytes": 1 << 20, "quorum": 0.25}
        grid = bench.grid(**changes)
        grid.tamper = {
            client: added_to_b(added) for client, added in ((1, 0.3), (2, 1e10), (3, 3e37))
        }
        document = summary(folder := bench.run(grid, **changes))
        assert [client["status"] for client in document["clients"]] == ["completed"] + [
            "dropped"
        ] * 3
        assert {client["reason"] for client in document["clients"][1:]} == {
            "train: reply refused: block-0000 attn.q.lora_b: a number is larger than 2 steps of "
            "training.learning-rate = 0.01 can make it"
        }
        without_them = bench.grid(**changes)
        without_them.tamper = dict.fromkeys((1, 2, 3), silent_after_enrolment)
        assert model_files(folder) == model_files(bench.run(without_them, **changes))

    @pytest.mark.parametrize("aggregation", ["factors", "svd"])
    @pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "nf4"])
    @pytest.mark.parametrize("rate", [1e-6, 0.1])
    def test_honest_clients_stay_below_the_limit(
        self, bench: Bench, aggregation: str, wire_dtype: str, rate: float
    ) -> None:
        """Balanced factors make A much smaller, and the NF4 loss of a larger A is added to it."""
        changes = {
            "fedpetuning__aggregation": aggregation,
            "federation__wire_dtype": wire_dtype,
            "federation__rounds": 3,
            "training__learning_rate": rate,
            "training__weight_decay": 0.1,
            "num_clients": 2,
            "lora__merge": False,
        }
        clients = summary(bench.run(**changes))["clients"]
        assert {client["status"] for client in clients} == {"completed"}

    # ----- wire dtypes ----------------------------------------------------------------------------

    @pytest.mark.parametrize("wire_dtype", ["bfloat16", "nf4"])
    def test_bytes_of_blobs_are_those_of_the_formulas(self, bench: Bench, wire_dtype: str) -> None:
        changes = {"federation__wire_dtype": wire_dtype, "num_clients": 2}
        grid = bench.grid(**changes)
        requests = []
        grid.before_push = requests.append
        bench.run(grid, **changes)
        up = [
            blob
            for number in (1, 2)
            for kind in ("train", "fetch")
            for blob in self._blobs(grid, number, kind)
        ]
        asked = [read(request.content) for request in requests]
        down = [
            blob
            for body in asked
            if body.header.kind in ("train", "deliver")
            for blob in body.blobs.values()
        ]
        # Two blocks, two rounds, two clients.
        assert len(up) == 2 * 2 * 2
        # Two blocks of the second round, two clients.
        assert len(down) == 2 * 2
        assert {num_data_bytes(blob) for blob in up + down} == {block_bytes(wire_dtype, 2)}

    def _blobs(self, grid: Any, server_round: int, kind: str) -> list[bytes]:
        replies = bodies(grid, server_round, kind)
        return [
            blob for client in replies for body in replies[client] for blob in body.blobs.values()
        ]

    def test_first_round_sends_rounded_changes(self, bench: Bench) -> None:
        changes = {"federation__wire_dtype": "bfloat16"}
        exact = bench.grid()
        rounded = bench.grid(**changes)
        bench.run(exact, federation__rounds=1)
        bench.run(rounded, **changes, federation__rounds=1)
        trained = sent_adapters(exact, 1)
        found = sent_adapters(rounded, 1)
        start = first_adapters(bench)
        for client, blobs in trained.items():
            for key, tensors in blobs.items():
                assert tensors
                for name, tensor in tensors.items():
                    meant = tensor - start[key][name]
                    assert torch.equal(found[client][key][name], meant.to(torch.bfloat16))

    def test_differences_are_added_before_rounding(self, bench: Bench) -> None:
        """Replies carry differences from the round's start, pushes from the initial adapters.

        Two rounds are recomputed with loops.
        """
        changes = {"federation__wire_dtype": "bfloat16"}
        grid = bench.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        folder = bench.run(grid, **changes)
        first = first_adapters(bench)
        samples = {
            client["client"]: client["metrics"]["samples"] for client in summary(folder)["clients"]
        }
        kept: dict[str, dict[str, np.ndarray]] = {
            key: {name: tensor.double().numpy() for name, tensor in block.items()}
            for key, block in first.items()
        }
        for server_round in (1, 2):
            changed = sent_adapters(grid, server_round)
            for key, block in kept.items():
                for name in block:
                    total = sum(
                        samples[client] * changed[client][key][name].double().numpy()
                        for client in samples
                    )
                    block[name] = block[name] + total / sum(samples.values())
            if server_round == 1:
                for client, blobs in brought(requests, 2).items():
                    assert set(blobs) == set(kept), client
                    for key, tensors in blobs.items():
                        for name, tensor in tensors.items():
                            moved = torch.from_numpy(
                                kept[key][name] - first[key][name].double().numpy()
                            )
                            torch.testing.assert_close(
                                tensor.double(), moved, rtol=2**-8, atol=1e-8
                            )
        for block_number in (0, 1):
            for matrix in PATHS:
                b, a = written(folder, block_number, matrix)
                np.testing.assert_allclose(
                    b, kept[f"block-{block_number:04d}"][f"{matrix}.lora_b"], rtol=1e-6, atol=1e-8
                )
                np.testing.assert_allclose(
                    a, kept[f"block-{block_number:04d}"][f"{matrix}.lora_a"], rtol=1e-6, atol=1e-8
                )

    def test_client_goes_on_without_private_state(self, bench: Bench) -> None:
        changes = {"federation__wire_dtype": "nf4", "federation__rounds": 3, "part_bytes": 1 << 20}
        state = bench.folder / "state"
        grid = bench.grid(**changes)
        removed = list[Path]()
        for context in grid.contexts.values():
            context.node_config["state-dir"] = str(state)

        def lose(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round, header.client) == ("train", 3, 2):
                (folder,) = state.glob("*/node-00002")
                shutil.rmtree(folder)
                removed.append(folder)

        grid.before_push = lose
        clients = summary(bench.run(grid, **changes))["clients"]
        assert len(removed) == 1
        assert {client["status"] for client in clients} == {"completed"}

    @pytest.mark.parametrize("aggregation", ["factors", "svd"])
    def test_svd_aggregation_leaves_out_feedback(
        self, bench: Bench, aggregation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rounding losses of A and B belong to other directions after an SVD."""
        owed = []

        def pack(tensors: Any, wire_dtype: Any, residuals: Any = None) -> Any:
            owed.append(bool(residuals))
            return pack_adapters(tensors, wire_dtype, residuals)

        monkeypatch.setattr("client_app.methods.tuning.fedpetuning.pack_adapters", pack)
        monkeypatch.setattr("strategies.averaging.adapters.pack_adapters", pack)
        bench.run(federation__wire_dtype="nf4", fedpetuning__aggregation=aggregation)
        assert any(owed) == (aggregation == "factors")

    # ----- layers ---------------------------------------------------------------------------------

    def test_only_the_layers_that_were_chosen_change(self, bench: Bench) -> None:
        folder = bench.run(lora__layers="1")
        paths = (bench.model, folder / "model")
        base, merged = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
            for path in paths
        )
        changed = {name for name, value in base.items() if not torch.equal(value, merged[name])}
        assert changed == {f"model.layers.1.self_attn.{matrix}_proj.weight" for matrix in "qv"}

    # ----- resumption -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "changes",
        [
            {"federation__wire_dtype": "nf4", "fedpetuning__aggregation": "svd"},
            {
                "federation__wire_dtype": "nf4",
                "federation__fleet": "low",
            },
        ],
        ids=["svd", "carried"],
    )
    def test_run_killed_within_round_resumes_equal(
        self, bench: Bench, changes: dict[str, Any]
    ) -> None:
        changes = {"federation__rounds": 3, **changes}
        uninterrupted = bench.run(**changes)
        folder = bench.killed(third_order_of(2), **changes)
        resumed = bench.run(resume_from=str(folder), **changes)
        assert results(resumed) == results(uninterrupted)
        assert summary(resumed) == summary(uninterrupted)

    def test_set_back_run_resumes_equal(self, bench: Bench) -> None:
        """This is the documented remedy for a damaged checkpoint.

        A client that was ahead of the server repeats its stored replies.
        """
        changes = {"federation__rounds": 3}
        uninterrupted = bench.run(**changes)
        folder = bench.killed(third_order_of(3), **changes)
        (folder / "checkpoint" / "previous.json").replace(folder / "checkpoint" / "state.json")
        resumed = bench.run(resume_from=str(folder), **changes)
        assert {client["status"] for client in summary(resumed)["clients"]} == {"completed"}
        assert model_files(resumed) == model_files(uninterrupted)

    @pytest.mark.parametrize(
        ("fleet", "clients", "reason"),
        [
            (
                "none.toml",
                4,
                "federation.fleet = 'none.toml': there is no none.toml; conf/devices has some",
            ),
            ("a\0b", 4, r"federation.fleet = 'a\x00b': '.*' cannot be read: embedded null byte"),
            ("low", 11, r"federation.fleet = 'low': num-clients = 11: the fleet has 10 devices"),
        ],
    )
    def test_missing_or_too_small_fleet_is_refused(
        self, bench: Bench, fleet: str, clients: int, reason: str
    ) -> None:
        with pytest.raises(EspalierError, match=reason):
            bench.run(num_clients=clients, federation__fleet=fleet)
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize(
        ("place", "name", "entries", "seen"),
        [
            (CheckpointFolder, "save", 4, [1]),
            (Ledger, "record_round", 4, [1, 2]),
            (Ledger, "record_round", 6, [1, 2]),
        ],
        ids=["before its checkpoint", "behind it", "among its times"],
    )
    def test_round_times_are_told_once_despite_kills(
        self,
        bench: Bench,
        monkeypatch: pytest.MonkeyPatch,
        place: type,
        name: str,
        entries: int,
        seen: list[int],
    ) -> None:
        """The server is killed in round 2 at three places.

        - before the checkpoint, so that the round is repeated
        - after the checkpoint, before the entries of the ledger
        - among the entries of the ledger
        """
        changes = {"federation__rounds": 3, "federation__fleet": "low"}
        usual = getattr(place, name)
        calls = list[int]()

        def fail(self: Any, first: Any, *rest: Any) -> None:
            calls.append(1)
            if len(calls) > entries if place is Ledger else first == 2:
                raise Killed
            usual(self, first, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(Killed):
                bench.run(**changes)
        (killed,) = bench.runs()
        assert len(self._told(killed)) == entries
        assert [one["round"] for one in summary(killed)["clients"][0]["rounds"]] == seen, (
            "of finished rounds alone"
        )
        folder = bench.run(resume_from=str(killed), **changes)
        assert self._told(folder) == [
            (number, client) for number in (1, 2, 3) for client in range(4)
        ]
        rounds = [
            [one["round"] for one in client["rounds"]] for client in summary(folder)["clients"]
        ]
        assert rounds == 4 * [[1, 2, 3]]

    def _told(self, folder: Path) -> list[tuple[int, int]]:
        """Return rounds and clients whose times are in the ledger."""
        entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        return [(entry["round"], entry["client"]) for entry in entries if entry["kind"] == "round"]

    def test_a_torn_ledger_does_not_hold_a_run_up(self, bench: Bench) -> None:
        """A machine that goes down may leave half a line; its time is recorded again."""
        changes = {"federation__rounds": 2, "federation__fleet": "low"}
        folder = bench.killed(lambda header: header.server_round == 2, **changes)
        ledger = folder / "ledger.jsonl"
        lines = ledger.read_text().splitlines(keepends=True)
        last = max(place for place, line in enumerate(lines) if '"kind": "round"' in line)
        ledger.write_text("".join(lines[:last]) + lines[last][:-20])
        resumed = bench.run(resume_from=str(folder), **changes)
        readable = [
            line
            for line in (resumed / "ledger.jsonl").read_text().splitlines()
            if line.endswith("}")
        ]
        told = [entry["round"] for entry in map(json.loads, readable) if entry["kind"] == "round"]
        assert Counter(told) == {1: 4, 2: 4}

    def test_a_ledger_that_cannot_be_read_is_named(self, bench: Bench) -> None:
        changes = {"federation__rounds": 2}
        folder = bench.killed(lambda header: header.server_round == 2, **changes)
        (folder / "ledger.jsonl").unlink()
        (folder / "ledger.jsonl").mkdir()
        with pytest.raises(EspalierError, match=r"ledger\.jsonl: cannot be read: Is a directory"):
            bench.run(resume_from=str(folder), **changes)

    # ----- refusals of a site ---------------------------------------------------------------------

    def _train(
        self,
        grid: InProcessGrid,
        server_round: int,
        blobs: dict[str, bytes] | None = None,
        limit: int = 2,
    ) -> MessageBody:
        """Return the reply of the first client to an order."""
        header = Header.model_validate(
            {
                "schema_version": SCHEMA_VERSION, "kind": "train", "method": "fedpetuning", "lineage": BY_HAND, "attempt": 1,
                "server_round": server_round, "client": 0, "part": 0, "num_parts": 1,
            }
        )  # fmt: skip
        node, context = next(iter(grid.contexts.items()))
        message = address(MessageBody(header, {"rank_limit": limit}, blobs or {}), node, 60.0)
        return read(grid.answer(message, context).content)

    def test_past_rounds_are_not_answered_again(self, bench: Bench) -> None:
        changes = {"part_bytes": 1 << 20, "federation__rounds": 3}
        grid = bench.grid(**changes)
        first = self._train(grid, 1)
        assert first.header.status == "ok"
        second = self._train(grid, 2, first.blobs)
        assert second.header.status == "ok"
        again = self._train(grid, 2, first.blobs)
        assert (again.blobs, again.fields) == (second.blobs, second.fields)
        # The server went back to the previous checkpoint.
        again = self._train(grid, 1)
        assert (again.blobs, again.fields) == (first.blobs, first.fields)
        for reply, words in (
            (self._train(grid, 2, second.blobs), "this client answered another request of round 2"),
            (self._train(grid, 1, limit=1), "this client answered round 2; round 1 is over"),
            (self._train(grid, 0), "a train of round 0 does not exist"),
            (self._train(grid, 4, first.blobs), "a train of round 4 does not exist"),
            (self._train(grid, 3, first.blobs, limit=10**30), "rank_limit is above 2"),
        ):
            assert reply.header.status == "failed"
            assert words in reply.fields["reason"]
            assert not reply.blobs

    @pytest.mark.parametrize(("least", "status"), [(64, "ok"), (65, "failed")])
    def test_a_site_refuses_a_round_of_few_tokens(
        self, bench: Bench, least: int, status: str
    ) -> None:
        """A round has 64 tokens: two steps of two sequences of 16 tokens."""
        grid = bench.grid()
        next(iter(grid.contexts.values())).node_config["min-tokens"] = least
        reply = self._train(grid, 1)
        assert reply.header.status == status
        assert status == "ok" or reply.fields["reason"].startswith(
            "min-tokens = 65: the answer would be computed from fewer tokens"
        )

    # ----- the adapter ----------------------------------------------------------------------------

    def test_failed_export_check_costs_no_figures(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def differ(*_: object) -> None:
            raise ExportError("adapter: logits of the reloaded model differ by 7")

        monkeypatch.setattr("server_app.artifacts.adapters.check_adapter", differ)
        with pytest.raises(ExportError, match="differ by 7"):
            bench.run()
        (folder,) = (bench.folder / "runs").iterdir()
        document = summary(folder)
        assert document["status"] == "failed"
        assert "differ by 7" in document["reason"]
        assert (
            document["metrics"][0]["values"]["federated"]
            < document["metrics"][0]["values"]["dense"]
        )
        assert (folder / "failed-adapter" / "adapter_model.safetensors").exists()
        assert not (folder / "adapter").exists()

    def test_peft_loads_adapter_to_equal_logits(self, plain: Uninterrupted) -> None:
        folder = plain.folder
        bench = plain.bench
        tokens = torch.arange(40).view(2, 20) + 60
        base, merged = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            for path in (bench.model, folder / "model")
        )
        with torch.no_grad():
            before = base(input_ids=tokens).logits
            tuned = (
                PeftModel.from_pretrained(base, str(folder / "adapter"))
                .eval()(input_ids=tokens)
                .logits
            )
            whole = merged(input_ids=tokens).logits
        assert (tuned - before).abs().max() > 0.01
        # The merged weights are rounded to bfloat16.
        torch.testing.assert_close(tuned, whole, rtol=0.05, atol=0.05)
