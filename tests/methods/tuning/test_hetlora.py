"""HetLoRA: promises of every method.

Every client has its own rank, update norms are the weights, and clients may give up ranks.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from safetensors.torch import load, save

import client_app.methods.tuning.fedpetuning
from espalier.errors import EspalierError
from espalier.hf.opening.opened import open_model
from espalier.messages.message import MessageBody
from espalier.messages.records import STYPE, read
from espalier.models.adapters import adapter_plan
from espalier.settings.tables.fleet import read_fleet
from espalier.settings.tables.lora import LoraSettings
from espalier.training.initial_values import initial_adapters
from strategies.base.rounds import RunFailed
from tests.bench import Bench, events, private_text, results, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import third_order_of
from tests.methods.promises.promises import Promises
from tests.methods.tuning.adapters_sent import (
    PATHS,
    added_to_b,
    bodies,
    decoded_adapters,
    factors,
    norm_weights,
    num_data_bytes,
    padded_mean,
    sent_adapters,
    svd_mean,
    updates,
    written,
)

SIDES = 16 + 16 + 16 + 8
"""Inputs and outputs of the adapted matrices of one block; the bench's model has two blocks."""
FLEETS = Path(__file__).parents[3] / "conf" / "devices"
PRUNED = {
    "hetlora__regularisation": 1.0,
    "federation__rounds": 3,
    "training__steps": 5,
    "training__schedule": "linear",
}
"""Settings with a strong penalty and small steps.

Every client gives up half of its ranks in round 2.
"""


def limits(requests: list[Message], server_round: int, kind: str = "train") -> dict[int, int]:
    """Return the rank limit of each client's orders in a round."""
    asked = [read(request.content) for request in requests]
    chosen = [
        body
        for body in asked
        if (body.header.kind, body.header.server_round) == (kind, server_round)
    ]
    return {body.header.client: body.fields["rank_limit"] for body in chosen}


def assert_zero_beyond(body: MessageBody, rank: int) -> None:
    for blob in body.blobs.values():
        for name, tensor in load(blob).items():
            beyond = tensor[rank:] if name.endswith("lora_a") else tensor[:, rank:]
            within = tensor[:rank] if name.endswith("lora_a") else tensor[:, :rank]
            assert not beyond.any()
            assert within.any()


class TestHetLoRA(Promises):
    """Federations with two rounds of a few steps on two matrices of each block.

    The clients have ranks 2, 4, 8 and 8.
    """

    method = "hetlora"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "hetlora.ranks": "2,4,8",
        "hetlora.gamma": 0.5,
        "training.steps": 2,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 8,
        "lora.alpha": 16.0,
        "lora.merge": True,
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    # ----- ranks ----------------------------------------------------------------------------------

    def test_adapters_travel_in_their_rank_s_shapes(self, on_own_text: Bench) -> None:
        changes = {"hetlora__gamma": 1.0}
        grid = on_own_text.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        clients = summary(on_own_text.run(grid, **changes))["clients"]
        assert limits(requests, 1) == limits(requests, 2) == {0: 2, 1: 4, 2: 8, 3: 8}
        # The pushed result has the full rank.
        assert limits(requests, 3, "deliver") == dict.fromkeys(range(4), 8)
        assert [client["metrics"]["lora_rank"] for client in clients] == [2, 4, 8, 8]
        for client, lora_rank in enumerate((2, 4, 8, 8)):
            replies = [
                body
                for kind in ("train", "fetch")
                for body in bodies(grid, 1, kind).get(client, [])
            ]
            blobs = [blob for body in replies for blob in body.blobs.values()]
            assert [num_data_bytes(blob) for blob in blobs] == [4 * lora_rank * SIDES] * 2
            shapes = {name: tuple(tensor.shape) for name, tensor in load(blobs[0]).items()}
            assert shapes["attn.q.lora_a"] == (lora_rank, 16)
            assert shapes["attn.v.lora_b"] == (8, lora_rank)

    def test_round_starts_from_first_global_ranks(self, bench: Bench) -> None:
        grid = bench.grid()
        requests = list[Message]()
        grid.before_push = requests.append
        bench.run(grid)
        sent = sent_adapters(grid, 1)
        brought = dict[int, dict[str, torch.Tensor]]()
        for request in requests:
            body = read(request.content)
            if body.header.kind in ("deliver", "train") and body.header.server_round == 2:
                for blob in body.blobs.values():
                    # Parts are in block order, so the first blob is that of block 0.
                    brought.setdefault(body.header.client, load(blob))
        b, a = padded_mean(sent, norm_weights(sent), 0, "attn.v", 8)
        for client, lora_rank in enumerate((2, 4, 8, 8)):
            np.testing.assert_allclose(
                brought[client]["attn.v.lora_b"].numpy(), b[:, :lora_rank], rtol=1e-5, atol=1e-8
            )
            np.testing.assert_allclose(
                brought[client]["attn.v.lora_a"].numpy(), a[:lora_rank], rtol=1e-5, atol=1e-8
            )

    def test_capability_decides_without_set_ranks(self, bench: Bench) -> None:
        grid = bench.grid(hetlora__ranks="")
        requests = list[Message]()
        grid.before_push = requests.append
        for context, capability in zip(grid.contexts.values(), (4.0, 2.0, 0.1, 3.0), strict=True):
            context.node_config["capability"] = capability
        document = summary(bench.run(grid, hetlora__ranks=""))
        assert limits(requests, 1) == {0: 8, 1: 4, 2: 1, 3: 6}
        assert {client["status"] for client in document["clients"]} == {"completed"}

    def test_unsampled_client_has_its_rank_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ranks = {}
        alone = client_app.methods.tuning.fedpetuning._train_local_baseline

        def noted(site: Any, state: Any, header: Any, adapters: Any, *beside: Any) -> Any:
            ranks[header.client] = max(adapter.rank for _, adapter in adapters)
            return alone(site, state, header, adapters, *beside)

        monkeypatch.setattr(client_app.methods.tuning.fedpetuning, "_train_local_baseline", noted)
        drawn = {"federation__rounds": 1, "federation__sampled_clients": 0.25}
        changes = {"hetlora__ranks": "", **drawn, "evaluation__local_baseline": True}
        grid = bench.grid(**changes)
        for context, capability in zip(grid.contexts.values(), (4.0, 2.0, 0.1, 3.0), strict=True):
            context.node_config["capability"] = capability
        bench.run(grid, **changes)
        assert ranks == {0: 8, 1: 4, 2: 1, 3: 6}

    def test_mixed_capability_sources_are_refused(self, bench: Bench) -> None:
        grid = bench.grid(hetlora__ranks="")
        next(iter(grid.contexts.values())).node_config["capability"] = 0.0
        with pytest.raises(
            EspalierError, match=r"node-00000 measured its own, .* or set hetlora.ranks"
        ):
            bench.run(grid, hetlora__ranks="")

    # ----- the average ----------------------------------------------------------------------------

    def _last(self, bench: Bench, **changes: Any) -> tuple[InProcessGrid, Any]:
        changes |= {"federation__rounds": 1}
        grid = bench.grid(**changes)
        return grid, bench.run(grid, **changes)

    def test_padded_factors_are_averaged_by_norm(self, bench: Bench) -> None:
        grid, folder = self._last(bench)
        sent = sent_adapters(grid, 1)
        weights = norm_weights(sent)
        assert len(set(weights.values())) == 4
        for block in (0, 1):
            for matrix in PATHS:
                means = padded_mean(sent, weights, block, matrix, 8)
                for found, mean in zip(written(folder, block, matrix), means, strict=True):
                    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-9)

    @pytest.mark.parametrize("weights", ["norms", "samples"])
    def test_updates_are_averaged_and_approximated(self, bench: Bench, weights: str) -> None:
        grid, folder = self._last(
            bench, hetlora__aggregation="svd", federation__client_weights=weights
        )
        sent = sent_adapters(grid, 1)
        samples = {
            client: float(replies[0].fields["samples"])
            for client, replies in bodies(grid, 1, "train").items()
        }
        for matrix in PATHS:
            expected = svd_mean(
                sent, norm_weights(sent) if weights == "norms" else samples, 1, matrix, 8
            )
            assert np.abs(expected).max() > 1e-4
            np.testing.assert_allclose(
                np.matmul(*written(folder, 1, matrix)), expected, rtol=1e-4, atol=1e-8
            )

    def test_unchanged_adapters_have_equal_weights(self, bench: Bench) -> None:
        """B starts at zero, and the learning rate is too small to change it in float32."""
        grid, folder = self._last(bench, training__learning_rate=1e-300)
        sent = sent_adapters(grid, 1)
        assert set(norm_weights(sent).values()) == {0.0}
        mean_b, mean_a = padded_mean(sent, dict.fromkeys(sent, 1.0), 0, "attn.q", 8)
        b, a = written(folder, 0, "attn.q")
        assert not b.any()
        assert not mean_b.any()
        np.testing.assert_allclose(a, mean_a, rtol=1e-6)

    def test_equal_clients_give_their_common_result(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for client in range(bench.num_clients):
            (bench.folder / f"text-{client}.txt").write_text(private_text(0))
        # All clients go through their text in the same order.
        monkeypatch.setattr("client_app.methods.tuning.fedpetuning.derive_seed", lambda *_, **__: 5)
        grid, folder = self._last(bench, hetlora__ranks="8")
        sent = sent_adapters(grid, 1)
        for matrix in PATHS:
            for found, expected in zip(
                written(folder, 1, matrix), factors(sent, 3, 1, matrix), strict=True
            ):
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)

    def test_one_client_of_rank_2_and_one_of_8(self, bench: Bench) -> None:
        """Ranks that one client lacks are those of the other, times its weight.

        With the SVD both updates are complete.
        """
        for aggregation in ("zero-pad", "svd"):
            grid, folder = self._last(
                bench,
                hetlora__ranks="2,8",
                num_clients=2,
                hetlora__aggregation=aggregation,
                federation__max_weight_ratio=1e6,
            )
            sent = sent_adapters(grid, 1)
            assert sorted(sent) == [0, 1]
            norms = norm_weights(sent)
            share = norms[1] / (norms[0] + norms[1])
            (b_2, a_2), (b_8, a_8) = (factors(sent, client, 0, "attn.q") for client in (0, 1))
            b, a = written(folder, 0, "attn.q")
            if aggregation == "zero-pad":
                np.testing.assert_allclose(b[:, 2:], share * b_8[:, 2:], rtol=1e-5, atol=1e-9)
                np.testing.assert_allclose(
                    a[:2], (1 - share) * a_2 + share * a_8[:2], rtol=1e-5, atol=1e-9
                )
            else:
                mean = (1 - share) * b_2 @ a_2 + share * b_8 @ a_8
                values = np.linalg.svd(mean, compute_uv=False)
                error = np.linalg.norm(b @ a - mean)
                assert error == pytest.approx(
                    float(np.sqrt((values[8:] ** 2).sum())), rel=1e-2, abs=1e-8
                )

    @pytest.mark.parametrize("aggregation", ["zero-pad", "svd"])
    def test_implausible_update_drops_its_sender(self, bench: Bench, aggregation: str) -> None:
        changes = {"hetlora__aggregation": aggregation, "part_bytes": 1 << 20}
        grid = bench.grid(**changes)
        grid.tamper[1] = added_to_b(100.0)
        clients = summary(bench.run(grid, **changes))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert "lora_b: a number is larger than 2 steps" in clients[1]["reason"]

    @pytest.mark.parametrize("aggregation", ["zero-pad", "svd"])
    def test_honest_clients_of_all_ranks_are_accepted(self, bench: Bench, aggregation: str) -> None:
        changes = PRUNED | {
            "hetlora__aggregation": aggregation,
            "federation__wire_dtype": "nf4",
            "training__learning_rate": 1e-6,
        }
        assert {client["status"] for client in summary(bench.run(**changes))["clients"]} == {
            "completed"
        }

    # ----- self-pruning ---------------------------------------------------------------------------

    def test_self_pruning_lowers_next_round_s_rank(self, bench: Bench) -> None:
        grid = bench.grid(**PRUNED)
        requests = list[Message]()
        grid.before_push = requests.append
        folder = bench.run(grid, **PRUNED)
        # B is zero before round 1.
        assert limits(requests, 1) == limits(requests, 2) == {0: 2, 1: 4, 2: 8, 3: 8}
        assert limits(requests, 3) == {0: 1, 1: 2, 2: 4, 3: 4}
        for client, replies in bodies(grid, 2, "train").items():
            kept = replies[0].fields["rank"]
            assert kept == {0: 1, 1: 2, 2: 4, 3: 4}[client]
            for body in [*replies, *bodies(grid, 2, "fetch").get(client, [])]:
                assert_zero_beyond(body, kept)
                assert {
                    len(t)
                    for b in body.blobs.values()
                    for n, t in load(b).items()
                    if n.endswith("a")
                } == {2 * kept}
        pruned = [
            (event["client"], event["lora_rank"])
            for event in events(folder)
            if event["event"] == "rank_pruned"
        ]
        assert pruned[:4] == [(0, 1), (1, 2), (2, 4), (3, 4)]

    def test_without_it_ranks_stay(self, bench: Bench) -> None:
        changes = {
            key: value for key, value in PRUNED.items() if key != "hetlora__regularisation"
        } | {"hetlora__gamma": 1.0}
        grid = bench.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        bench.run(grid, **changes)
        assert limits(requests, 3) == {0: 2, 1: 4, 2: 8, 3: 8}

    @pytest.mark.parametrize(
        "wire_dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "nf4"]
    )
    def test_pruned_rank_stays_zero_despite_feedback(self, bench: Bench, wire_dtype: str) -> None:
        """Losses of earlier rounding are dropped with the rank.

        Ranks keep falling from round to round.
        """
        changes = PRUNED | {"federation__wire_dtype": wire_dtype, "federation__rounds": 4}
        grid = bench.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        assert {client["status"] for client in summary(bench.run(grid, **changes))["clients"]} == {
            "completed"
        }
        assert limits(requests, 3) == {0: 1, 1: 2, 2: 4, 3: 4}
        assert limits(requests, 4)[0] == 1

    @pytest.mark.parametrize(
        "wire_dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "nf4"]
    )
    def test_differences_are_added_to_first_ranks(self, bench: Bench, wire_dtype: str) -> None:
        """Ranks that a client gave up leave nothing, even if other clients still have them.

        The reference is computed with loops, round by round.
        """
        changes = PRUNED | {
            "federation__wire_dtype": wire_dtype,
            "federation__client_weights": "equal",
        }
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        opened = open_model(str(bench.model))
        first = initial_adapters(adapter_plan(opened.plan, LoraSettings(rank=8, alpha=16.0)), 0)
        whole = {
            key: {name: tensor.double().numpy() for name, tensor in block.items()}
            for key, block in first.items()
        }
        gave_up = 0
        for server_round in (1, 2, 3):
            sent = decoded_adapters(grid, server_round, wire_dtype)
            reports = {
                client: replies[0].fields["rank"]
                for client, replies in bodies(grid, server_round, "train").items()
            }
            for key, block in whole.items():
                for name in block:
                    total = np.zeros_like(block[name])
                    for client, left in reports.items():
                        change = sent[client][key][name].double().numpy()
                        along = 0 if name.endswith("lora_a") else 1
                        gave_up += change.shape[along] > left
                        for place in range(left):
                            where = (place, slice(None)) if along == 0 else (slice(None), place)
                            total[where] += block[name][where] + change[where]
                    block[name] = total / len(reports)
                # A rank that no client has any more starts again.
                for matrix in PATHS:
                    for place in range(8):
                        if (
                            not block[f"{matrix}.lora_a"][place].any()
                            and not block[f"{matrix}.lora_b"][:, place].any()
                        ):
                            block[f"{matrix}.lora_a"][place] = (
                                first[key][f"{matrix}.lora_a"][place].double().numpy()
                            )
        assert gave_up
        for block_number in (0, 1):
            for matrix in PATHS:
                b, a = written(folder, block_number, matrix)
                np.testing.assert_allclose(
                    b, whole[f"block-{block_number:04d}"][f"{matrix}.lora_b"], rtol=1e-5, atol=1e-8
                )
                np.testing.assert_allclose(
                    a, whole[f"block-{block_number:04d}"][f"{matrix}.lora_a"], rtol=1e-5, atol=1e-8
                )

    def test_rounded_updates_approximate_float32(self, bench: Bench) -> None:
        """The runs have three rounds over NF4."""
        common: dict[str, Any] = {
            "lora__merge": False,
            "federation__rounds": 3,
            "hetlora__gamma": 1.0,
            "training__steps": 3,
            "training__learning_rate": 0.002,
        }
        exact = updates(bench.run(**common))
        found = updates(bench.run(**common, federation__wire_dtype="nf4"))
        assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)

    def test_killed_after_pruning_equals_never_killed(self, bench: Bench) -> None:
        changes = PRUNED | {"federation__wire_dtype": "nf4"}
        uninterrupted = bench.run(**changes)
        folder = bench.killed(third_order_of(3), **changes)
        resumed = bench.run(resume_from=str(folder), **changes)
        assert results(resumed) == results(uninterrupted)
        assert summary(resumed) == summary(uninterrupted)

    def test_measured_run_goes_on_without_lost_site(self, bench: Bench) -> None:
        changes = {"hetlora__ranks": "", "num_clients": 2}
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config["capability"] = 0.0
        run = bench.killed(lambda header: header.server_round == 2, grid, **changes)
        again = bench.grid(**changes)
        for node in [
            node
            for node, context in again.contexts.items()
            if context.node_config["partition-id"] != 0
        ]:
            del again.contexts[node]
        next(iter(again.contexts.values())).node_config["capability"] = 0.0
        resumed = summary(bench.run(again, resume_from=str(run), **changes))
        assert [client["status"] for client in resumed["clients"]] == ["completed", "dropped"]

    # ----- a fleet's clock ------------------------------------------------------------------------

    def test_times_follow_fleet_and_current_ranks(self, bench: Bench) -> None:
        """A token costs 4 operations per frozen parameter and 6 per trained one.

        A byte has 8 bits, and nothing is sent to clients in round 1.
        """
        changes = {**PRUNED, "federation__fleet": "low", "evaluation__every": 1}
        grid = bench.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        folder = bench.run(grid, **changes)
        fleet = read_fleet(FLEETS / "low.toml")
        whole = open_model(str(bench.model)).plan.num_parameters
        document = summary(folder)
        seconds = []
        # Five steps of two sequences of 16 tokens.
        tokens = 16 * 2 * 5
        for number in (1, 2, 3):
            own = {}
            for client, rank in limits(requests, number).items():
                lora = 2 * SIDES * rank
                conditions = fleet.drawn(0, client, number)
                size = 4 * lora * (2 if number > 1 else 1)
                computing = tokens * (4 * whole + 6 * lora) / conditions.operations_per_second
                own[client] = computing + 8 * size / conditions.bits_per_second
                (noted,) = (
                    one for one in document["clients"][client]["rounds"] if one["round"] == number
                )
                assert (noted["virtual_seconds"], noted["bytes"]) == (
                    pytest.approx(own[client]),
                    size,
                )
            seconds.append(max(own.values()))
        assert limits(requests, 3)[3] < limits(requests, 1)[3]
        assert document["virtual_seconds"] == pytest.approx(sum(seconds))
        looks = json.loads((folder / "rounds.json").read_text())["rounds"]
        assert [look["seconds"] for look in looks] == pytest.approx(np.cumsum(seconds))
        entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        of_fleet = [entry["virtual_seconds"] for entry in entries if entry["kind"] == "round"]
        assert sum(of_fleet) == pytest.approx(
            sum(client["metrics"]["virtual_seconds"] for client in document["clients"])
        )
        assert "virtual_seconds" not in summary(bench.run())["clients"][0]["metrics"]

    # ----- claims about a rank --------------------------------------------------------------------

    def test_false_rank_report_drops_its_sender(self, bench: Bench) -> None:
        def claim(rank: int) -> Any:
            def tamper(request: Message, reply: Message) -> Message:
                if read(request.content).header.kind == "train":
                    reply.content["fields"]["rank"] = rank
                return reply

            return tamper

        grid = bench.grid()
        grid.tamper = {1: claim(1), 2: claim(9)}
        clients = summary(bench.run(grid))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "dropped",
            "completed",
        ]
        assert "not zero beyond rank 1, which the client reports" in clients[1]["reason"]
        assert "rank is above 8, the order's rank_limit" in clients[2]["reason"]

    def test_later_parts_must_match_reported_rank(self, bench: Bench) -> None:
        def fill(request: Message, reply: Message) -> Message:
            header = read(request.content).header
            if (header.kind, header.server_round) == ("fetch", 2):
                for key, blob in list(reply.content["blobs"].items()):
                    full = {
                        name: torch.ones_like(tensor) for name, tensor in load(blob.data).items()
                    }
                    reply.content["blobs"][key] = Array("", (), STYPE, save(full))
            return reply

        grid = bench.grid(**PRUNED)
        grid.tamper = {3: fill}
        clients = summary(bench.run(grid, **PRUNED))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "completed",
            "completed",
            "dropped",
        ]
        assert "not zero beyond rank 4, which the client reports" in clients[3]["reason"]

    def test_egress_refuses_nonzero_beyond_rank(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "client_app.methods.tuning.fedpetuning.cut_to_rank", lambda tensors, _: dict(tensors)
        )
        with pytest.raises(RunFailed, match="egress check: blobs: not zero beyond rank"):
            bench.run(**PRUNED)
