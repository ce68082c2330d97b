"""Rounds of FedSpine: means over the keepers of a row, times, and what bandits learn."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.records import read, write
from espalier.messages.tensor_blobs import tensor_specs
from espalier.settings.tables.fleet import read_fleet
from strategies.base.rounds import RunFailed
from strategies.tuning.fedspine.strategy import FedSpine
from tests.bench import Bench, results, summary
from tests.methods.tuning.adapters_sent import bodies, sent_adapters
from tests.methods.tuning.fedspine.fedspine_runs import (
    CHANNEL,
    GROUP,
    PATHS,
    FedSpineRuns,
    find,
    in_bits,
    kept_of,
    len_of,
    opened,
    refinements,
    structures,
)


class TestFedSpine(FedSpineRuns):
    @pytest.mark.parametrize(
        ("aggregation", "kind"),
        [("coverage", "samples"), ("coverage", "importance-samples"), ("zero-fill", "samples")],
    )
    def test_rows_are_averaged_over_their_keepers(
        self, bench: Bench, aggregation: str, kind: str
    ) -> None:
        """The expected mean comes from dense updates, row by row.

        The weights are computed by hand from the reports and the sent tensors.
        """
        changes = {
            "fedspine__aggregation": aggregation, "fedspine__allocation": "random",
            "federation__client_weights": kind,
        }  # fmt: skip
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        sent = sent_adapters(grid, 2)
        reports = [read(reply.content) for _, reply in grid.received]
        trained = {
            body.header.client: body.fields
            for body in reports
            if (body.header.kind, body.header.server_round) == ("train", 2)
        }
        taylor = {client: fields["taylor"] for client, fields in trained.items()}
        dense = {client: dense_updates(folder, client, own) for client, own in sent.items()}
        spectral = {
            client: np.mean([nuclear(own) for own, _ in updates.values()])
            for client, updates in dense.items()
        }
        importance = {
            client: (
                taylor[client] / np.mean(list(taylor.values()))
                + spectral[client] / np.mean(list(spectral.values()))
            )
            for client in sent
        }
        told = refinements(folder)[1]["devices"]
        assert {int(client): own["importance"] for client, own in told.items()} == pytest.approx(
            importance, rel=1e-3
        )
        samples = {client: trained[client]["samples"] for client in sent}
        weights = {
            client: samples[client] * (importance[client] if kind == "importance-samples" else 1.0)
            for client in sent
        }
        written = load_file(folder / "adapter" / "adapter_model.safetensors")
        for block, name in dense[0]:
            total = sum(weights[client] * dense[client][block, name][0] for client in sent)
            if aggregation == "coverage":
                covered = sum(weights[client] * dense[client][block, name][1] for client in sent)
                mean = np.divide(total, covered, out=np.zeros_like(total), where=covered > 0)
            else:
                mean = total / sum(weights.values())
            u, values, vh = np.linalg.svd(mean)
            best = (u[:, :4] * values[:4]) @ vh[:4]
            path = f"base_model.model.model.layers.{block}.{PATHS[name]}"
            b, a = (written[f"{path}.lora_{side}.weight"].double().numpy() for side in "BA")
            np.testing.assert_allclose(2.0 * b @ a, best, rtol=1e-4, atol=1e-6)

    def test_times_are_those_of_the_fleet(self, bench: Bench) -> None:
        """Equation 1 by hand: steps, full sequences, 4 and 6 operations, 8 bits per byte."""
        changes = {"federation__fleet": "low", "fedspine__allocation": "fixed", "fedspine__rank": 2}
        grid = bench.grid(**changes)
        asked = list[MessageBody]()
        grid.before_push = lambda message: asked.append(opened(message))
        folder = bench.run(grid, **changes)
        travelled = Counter[tuple[int, int]]()
        for body in [*asked, *(opened(reply) for _, reply in grid.received)]:
            sizes = [
                spec.num_bytes
                for blob in body.blobs.values()
                for spec in tensor_specs(blob).values()
            ]
            travelled[body.header.server_round, body.header.client] += sum(sizes)
        fleet = read_fleet(Path(__file__).parents[4] / "conf" / "devices" / "low.toml")
        whole = OpenedModel(bench.model).plan.num_parameters
        for note in refinements(folder):
            for client, device in note["devices"].items():
                structure = structures(folder, int(client))["structure"]
                sides = [
                    (len_of(block["groups"]), len_of(block["channels"]))
                    for block in structure["blocks"]
                ]
                groups, channels = (
                    (sum(own) for own in zip(*sides, strict=True))
                    if note["round"] == 2
                    else (4, 48)
                )
                lora = 2 * (2 * 7 * 16 + groups * (8 + 4 + 4 + 8) + channels * 3)
                kept = whole - GROUP * (4 - groups) - CHANNEL * (48 - channels)
                conditions = fleet.drawn(0, int(client), note["round"])
                computing = 3 * 2 * 16 * (4 * kept + 6 * lora) / conditions.operations_per_second
                size = device["num_bytes"]
                assert size == travelled[note["round"], int(client)] > 4 * lora * note["round"] - 1
                assert device["seconds"] == pytest.approx(
                    computing + 8 * size / conditions.bits_per_second
                )
            seconds = [device["seconds"] for device in note["devices"].values()]
            assert note["seconds"] == max(seconds)
            assert note["waiting_seconds"] == pytest.approx(max(seconds) - np.mean(seconds))
        document = summary(folder)
        assert document["virtual_seconds"] == pytest.approx(
            sum(note["seconds"] for note in refinements(folder))
        )
        for client, own in enumerate(document["clients"]):
            seconds = [note["devices"][str(client)]["seconds"] for note in refinements(folder)]
            assert own["metrics"]["virtual_seconds"] == pytest.approx(sum(seconds))
            assert [one["virtual_seconds"] for one in own["rounds"]] == seconds
            assert [one["bytes"] for one in own["rounds"]] == [
                note["devices"][str(client)]["num_bytes"] for note in refinements(folder)
            ]
            entries = [
                json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()
            ]
            times = [
                entry for entry in entries if entry["kind"] == "round" and entry["client"] == client
            ]
            assert [(entry["round"], entry["virtual_seconds"]) for entry in times] == list(
                enumerate(seconds, 1)
            )

    def test_measured_times_are_in_the_summary_too(self, bench: Bench) -> None:
        folder = bench.run(federation__fleet="measured")
        document = summary(folder)
        notes = refinements(folder)
        assert document["virtual_seconds"] is None
        for client, own in enumerate(document["clients"]):
            told = [note["devices"][str(client)] for note in notes]
            assert [(one["seconds"], one["bytes"]) for one in own["rounds"]] == [
                (device["seconds"], device["num_bytes"]) for device in told
            ]
        kinds = {
            json.loads(line)["kind"] for line in (folder / "ledger.jsonl").read_text().splitlines()
        }
        assert "train" in kinds, "the ledger has the messages"
        assert "round" not in kinds, "and no times of pretended devices"

    def test_a_bandit_s_history_is_in_the_checkpoint(self, bench: Bench) -> None:
        changes = {"federation__rounds": 4, "federation__sampled_clients": 0.75}
        whole = bench.run(**changes)
        state = json.loads((whole / "checkpoint" / "state.json").read_text())
        learned = {
            client: [pull[3] for pull in bandit["history"]]
            for client, bandit in find(state, "bandits").items()
        }
        drawn = {
            client: [n["round"] for n in refinements(whole) if client in n["devices"]]
            for client in learned
        }
        # The first round only tunes.
        assert learned == {client: rounds[1:] for client, rounds in drawn.items()}
        assert sum(map(len, learned.values())) >= 8
        folder = bench.killed(
            lambda header: header.server_round == 4 and header.kind == "train", **changes
        )
        rest = bench.grid(**changes)
        rest.held = {0: 9, 1: 3, 2: 6}
        assert results(bench.run(rest, **changes, resume_from=str(folder))) == results(whole)

    def test_dropped_device_teaches_no_bandit(self, bench: Bench) -> None:
        grid = bench.grid()
        grid.tamper[3] = in_bits(lambda bits: 3)
        state = json.loads((bench.run(grid) / "checkpoint" / "state.json").read_text())
        assert find(state, "bandits").keys() == {"0", "1", "2"}

    def test_importance_claim_is_capped_by_median(self, bench: Bench) -> None:
        def boasting(request: Message, reply: Message) -> Message:
            body = read(reply.content)
            if body.header.kind == "train":
                body.fields["taylor"] = 1e30
                reply.content = write(body)
            return reply

        grid = bench.grid(federation__max_weight_ratio=2.0)
        grid.tamper[0] = boasting
        for note in refinements(bench.run(grid, federation__max_weight_ratio=2.0)):
            importance = {
                int(client): device["importance"] for client, device in note["devices"].items()
            }
            assert importance[0] < 4 * min(importance.values())

    def test_losses_are_those_of_the_same_sequences(self, bench: Bench) -> None:
        """Without training they are equal, although every step has other sequences."""
        for rate in (1e-300, 0.01):
            grid = bench.grid(training__learning_rate=rate, federation__rounds=2)
            bench.run(grid, training__learning_rate=rate, federation__rounds=2)
            told = [replies[0].fields for replies in bodies(grid, 1, "train").values()]
            assert len(told) == bench.num_clients
            assert len({fields["loss_before"] for fields in told}) > 1
            for fields in told:
                fell = fields["loss_before"] - fields["loss_after"]
                assert (fell == 0) if rate < 1e-9 else (fell > 0)

    def test_measured_sequences_need_minimum_tokens(self, bench: Bench) -> None:
        """Both losses are means over the two sequences of a round, of 16 tokens each."""
        changes = {"training__steps": 2, "training__batch_size": 1}
        grid = bench.grid(**changes)
        grid.simulated = False
        for client, context in enumerate(grid.contexts.values()):
            own = {"site": f"site-{client}", "model-path": str(bench.model), "min-tokens": 33}
            context.node_config |= own | {"partition-id": -1, "num-partitions": 0}
        with pytest.raises(
            RunFailed,
            match=r"raise training\.steps, training\.batch-size or training\.accumulation",
        ):
            bench.run(grid, **changes)


def dense_updates(
    folder: Path, client: int, sent: dict[str, dict[str, torch.Tensor]]
) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    """Return a device's updates as dense matrices, and masks of the entries that it kept."""
    found = {}
    for block, kept in enumerate(kept_of(folder, client)):
        for name, keep in kept.items():
            tensors = sent[f"block-{block:04d}"]
            b, a = (tensors[f"{name}.lora_{side}"].double().numpy() for side in "ba")
            rows, columns = (
                (keep, [True] * a.shape[1])
                if name not in ("attn.o", "mlp.down")
                else ([True] * b.shape[0], keep)
            )
            update = np.zeros((len(rows), len(columns)))
            here = np.outer(rows, columns)
            update[np.ix_(rows, columns)] = 2.0 * b @ a
            found[block, name] = update, here.astype(float)
    return found


def nuclear(update: np.ndarray) -> float:
    """Return the sum of the singular values."""
    return float(np.linalg.svd(update, compute_uv=False).sum())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("importance", {0: 2.0, 1: 3.0}),
        ("samples", {0: 10.0, 1: 20.0}),
        ("importance-samples", {0: 20.0, 1: 60.0}),
        ("equal", {0: 1.0, 1: 1.0}),
    ],
)
def test_weights_of_devices(kind: str, expected: dict[int, float]) -> None:
    federation = SimpleNamespace(client_weights=kind)
    samples = {0: 10.0, 1: 20.0} if "samples" in kind else {0: 1.0, 1: 1.0}
    strategy = object.__new__(FedSpine)
    strategy.run = SimpleNamespace(settings=SimpleNamespace(federation=federation))  # type: ignore[assignment]
    strategy.averager = SimpleNamespace(samples_of=lambda _: samples)  # type: ignore[assignment]
    strategy._importance = {0: 2.0, 1: 3.0}
    assert strategy._weights([0, 1]) == expected
