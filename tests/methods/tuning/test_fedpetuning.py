"""FedPETuning: promises of every method, and averages of the clients' adapters."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.hf.export.model import ExportError
from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.records import address, read
from tests.bench import Bench, model_files, private_text, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Uninterrupted, silent_after_enrolment
from tests.methods.promises.promises import Promises, held_out
from tests.methods.tuning.adapters_sent import (
    PATHS,
    added_to_b,
    bodies,
    padded_mean,
    sent_adapters,
    svd_mean,
    written,
)
from tests.methods.tuning.fedpetuning_runs import FedPETuningRuns
from tests.run_names import BY_HAND


class TestFedPETuning(FedPETuningRuns, Promises):
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
        monkeypatch.setattr(
            "client_app.methods.tuning.adapter_averaging.derive_seed", lambda *_, **__: 5
        )
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

        def lose_a_push(request: Message, reply: Message) -> Message | None:
            header = read(request.content).header
            if (
                header.kind == "push"
                and header.server_round == 2
                and (not lost or header.client in lost)
            ):
                return lost.append(header.client)
            return reply

        grid.tamper = dict.fromkeys(range(4), lose_a_push)
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
            "local_baseline: evaluation.sequence-length = 16: the model has 15 positions"
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
                "schema_version": SCHEMA_VERSION, "kind": "train", "method": "fedpetuning",
                "lineage": BY_HAND, "attempt": 1, "server_round": server_round, "client": 0,
                "part": 0, "num_parts": 1,
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


@pytest.mark.slow
class TestMeansOfUpdates(FedPETuningRuns, Promises):
    """Promises of means of the updates B A (``fedpetuning.aggregation=svd``)."""

    settings: ClassVar[dict[str, Any]] = FedPETuningRuns.settings | {
        "fedpetuning.aggregation": "svd",
    }
