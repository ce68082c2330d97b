"""HetLoRA over several rounds: feedback, kills, times, and claims about a rank."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from safetensors.torch import load, save

from espalier.hf.opening.opened_model import open_model
from espalier.messages.records import STYPE, read
from espalier.models.adapters import adapter_plan
from espalier.settings.tables.fleet import read_fleet
from espalier.settings.tables.lora import LoraSettings
from espalier.training.initial_values import initial_adapters
from strategies.base.rounds import RunFailed
from tests.bench import Bench, results, summary
from tests.methods.promises.federations import third_order_of
from tests.methods.tuning.adapters_sent import PATHS, bodies, decoded_adapters, updates, written
from tests.methods.tuning.hetlora_runs import PRUNED, SIDES, HetLoRARuns, limits

FLEETS = Path(__file__).parents[3] / "conf" / "devices"


class TestHetLoRA(HetLoRARuns):
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
        changes = {"lora__ranks": "", "num_clients": 2}
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
            "client_app.methods.tuning.round_adapters.cut_to_rank", lambda tensors, _: dict(tensors)
        )
        with pytest.raises(RunFailed, match="egress check: blobs: not zero beyond rank"):
            bench.run(**PRUNED)
