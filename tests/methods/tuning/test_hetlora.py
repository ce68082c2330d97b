"""HetLoRA: promises of every method, ranks and averages.

Every client has its own rank, update norms are the weights, and clients may give up ranks.
"""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load

import client_app.methods.tuning.adapter_averaging
from espalier.errors import EspalierError
from espalier.messages.message import MessageBody
from espalier.messages.records import read
from tests.bench import Bench, events, private_text, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.promises import Promises
from tests.methods.tuning.adapters_sent import (
    PATHS,
    added_to_b,
    bodies,
    factors,
    norm_weights,
    num_data_bytes,
    padded_mean,
    sent_adapters,
    svd_mean,
    written,
)
from tests.methods.tuning.hetlora_runs import PRUNED, SIDES, HetLoRARuns, limits


def assert_zero_beyond(body: MessageBody, rank: int) -> None:
    for blob in body.blobs.values():
        for name, tensor in load(blob).items():
            beyond = tensor[rank:] if name.endswith("lora_a") else tensor[:, rank:]
            within = tensor[:rank] if name.endswith("lora_a") else tensor[:, :rank]
            assert not beyond.any()
            assert within.any()


class TestHetLoRA(HetLoRARuns, Promises):
    # ----- ranks ----------------------------------------------------------------------------------

    def test_adapters_travel_in_their_rank_s_shapes(self, on_own_text: Bench) -> None:
        changes = {"hetlora__gamma": 1.0}
        grid = on_own_text.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        clients = summary(on_own_text.run(grid, **changes))["clients"]
        assert limits(requests, 1) == limits(requests, 2) == {0: 2, 1: 4, 2: 8, 3: 8}
        # The pushed result has the full rank.
        assert limits(requests, 3, "push") == dict.fromkeys(range(4), 8)
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
            if body.header.kind in ("push", "train") and body.header.server_round == 2:
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
        grid = bench.grid(lora__ranks="")
        requests = list[Message]()
        grid.before_push = requests.append
        for context, capability in zip(grid.contexts.values(), (4.0, 2.0, 0.1, 3.0), strict=True):
            context.node_config["capability"] = capability
        document = summary(bench.run(grid, lora__ranks=""))
        assert limits(requests, 1) == {0: 8, 1: 4, 2: 1, 3: 6}
        assert {client["status"] for client in document["clients"]} == {"completed"}

    def test_unsampled_client_has_its_rank_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ranks = {}
        alone = client_app.methods.tuning.adapter_averaging._train_local_baseline

        def noted(site: Any, state: Any, header: Any, adapters: Any, *beside: Any) -> Any:
            ranks[header.client] = max(adapter.rank for _, adapter in adapters)
            return alone(site, state, header, adapters, *beside)

        monkeypatch.setattr(
            client_app.methods.tuning.adapter_averaging, "_train_local_baseline", noted
        )
        drawn = {"federation__rounds": 1, "federation__sampled_clients": 0.25}
        changes = {"lora__ranks": "", **drawn, "evaluation__local_baseline": True}
        grid = bench.grid(**changes)
        for context, capability in zip(grid.contexts.values(), (4.0, 2.0, 0.1, 3.0), strict=True):
            context.node_config["capability"] = capability
        bench.run(grid, **changes)
        assert ranks == {0: 8, 1: 4, 2: 1, 3: 6}

    def test_mixed_capability_sources_are_refused(self, bench: Bench) -> None:
        grid = bench.grid(lora__ranks="")
        next(iter(grid.contexts.values())).node_config["capability"] = 0.0
        with pytest.raises(
            EspalierError, match=r"node-00000 measured its own, .* or set lora.ranks"
        ):
            bench.run(grid, lora__ranks="")

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
        monkeypatch.setattr(
            "client_app.methods.tuning.adapter_averaging.derive_seed", lambda *_, **__: 5
        )
        grid, folder = self._last(bench, lora__ranks="8")
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
                lora__ranks="2,8",
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


@pytest.mark.slow
class TestMeansOfUpdates(HetLoRARuns, Promises):
    """Promises of means of the updates B A (``hetlora.aggregation=svd``)."""

    settings: ClassVar[dict[str, Any]] = HetLoRARuns.settings | {"hetlora.aggregation": "svd"}
