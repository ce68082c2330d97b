"""FedSpine: promises of every method.

Devices agree on their cuts, adapters follow the cuts, and importance scores stay at the devices.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from espalier.errors import EspalierError
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.blobs.cuts import CUT
from espalier.messages.message import MessageBody
from espalier.messages.records import read, write
from espalier.messages.tensor_blobs import pack_tensors, tensor_specs, unpack_tensors
from espalier.models.structure import Structure
from espalier.settings.tables.fleet import read_fleet
from strategies.base.rounds import RunFailed
from strategies.tuning.fedspine.strategy import FedSpine
from tests.bench import Bench, Home, events, model_files, results, summary
from tests.methods.promises.contracts import assert_planned, outgoing_bytes
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.personal_promises import PersonalPromises, perplexity_of, samples_of
from tests.methods.tuning.adapters_sent import bodies, sent_adapters
from tests.tiny_model import WORDS, save_tiny_llama, save_tiny_roberta

GROUP = 384
CHANNEL = 48
"""Parameters of a prunable group of the bench's model.

The model has two blocks with 2 attention groups and 24 channels each; its hidden size is 16.
"""
UNITS = 2 * (2 + 24)
PATHS = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
SHARES = {
    "fedspine__selection": "global",
    "fedspine__pruning_ratio": 0.25,
    "fedspine__prune_rounds": 2,
}


class TestFedSpine(PersonalPromises):
    """Federations with two rounds of a few steps.

    Round 1 tunes the whole model, round 2 prunes 25%.
    """

    method = "fedspine"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "fedspine.pruning-ratio": 0.25,
        "fedspine.keep-models": False,
        "training.steps": 3,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 4,
        "lora.alpha": 8.0,
        "lora.targets": "all",
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"
    in_kept_run: ClassVar[dict[str, Any]] = {"fedspine.allocation": "random"}

    # ----- each device's own model ----------------------------------------------------------------

    def test_device_models_are_written_as_reported(self, bench: Bench) -> None:
        changes = {
            "fedspine__keep_models": True,
            "evaluation__local_baseline": True,
            "evaluation__max_samples": 1000,
        }
        folder = bench.run(**changes)
        samples = samples_of(bench, bench.public.read_text())
        for told in summary(folder)["clients"]:
            model = AutoModelForCausalLM.from_pretrained(
                folder / "clients" / told["site"], dtype=torch.float32
            ).eval()
            expected = perplexity_of(model, samples)
            assert told["metrics"]["perplexity/public/federated"] == pytest.approx(
                expected, rel=1e-3
            )
            whole = OpenedModel(bench.model).plan.num_parameters
            gone = whole - sum(value.numel() for value in model.parameters())
            assert gone == round(told["metrics"]["pruned"] * 2 * (2 * GROUP + 24 * CHANNEL))

    # ----- private and outgoing values ------------------------------------------------------------

    def test_no_outgoing_byte_tells_unit_importance(self, kept: Uninterrupted) -> None:
        for client in range(kept.bench.num_clients):
            values = importances(kept, client)
            assert values.shape == (UNITS,)
            assert (values > 0).sum() > UNITS / 2
            secrets = [
                values.numpy().tobytes(),
                values.float().numpy().tobytes(),
                *(f"{value}" for value in values.tolist()),
            ]
            secrets = [
                secret if isinstance(secret, bytes) else secret.encode()
                for secret in secrets
                if len(secret) > 6
            ]
            for _, reply in kept.received:
                data = outgoing_bytes(reply)
                assert not [
                    secret for secret in secrets if secret[: max(8, len(secret) // 4)] in data
                ]

    # ----- each device's own model ----------------------------------------------------------------

    def masked_model(self, run: Uninterrupted, client: int) -> torch.nn.Module:
        """Return transformers' full model with LoRA.

        Rows and columns that a device cut are zero.
        """
        model = AutoModelForCausalLM.from_pretrained(run.bench.model, dtype=torch.float32)
        lora = load_file(run.folder / "adapter" / "adapter_model.safetensors")
        with torch.no_grad():
            for index, (block, kept) in enumerate(
                zip(model.model.layers, kept_of(run.folder, client), strict=True)
            ):
                for name, keep in kept.items():
                    prefix = f"base_model.model.model.layers.{index}.{PATHS[name]}"
                    weight = block.get_submodule(PATHS[name]).weight
                    weight += (
                        2.0 * lora[f"{prefix}.lora_B.weight"] @ lora[f"{prefix}.lora_A.weight"]
                    )
                    cut = ~torch.tensor(keep)
                    if name in ("attn.o", "mlp.down"):
                        weight[:, cut] = 0
                    else:
                        weight[cut] = 0
        return model

    def test_devices_have_cuts_and_ranks_of_their_own(self, kept: Uninterrupted) -> None:
        documents = [structures(kept.folder, client) for client in range(4)]
        assert len({json.dumps(document["structure"]) for document in documents}) > 1
        assert len({document["lora_rank"] for document in documents}) > 1
        for document, client in zip(documents, summary(kept.folder)["clients"], strict=True):
            assert (document["pruned"], document["lora_rank"]) == (
                client["metrics"]["pruned"],
                client["metrics"]["lora_rank"],
            )

    def test_units_go_by_the_gradients_of_masks(self, bench: Bench) -> None:
        """FedAPT uses one pruning ratio and one rank for all devices.

        Other groups are pruned than with LoRA's gradients, but equally many parameters.
        """
        same = {"fedspine__allocation": "fixed", "fedspine__selection": "kind"}
        by_masks, by_lora = (
            bench.run(**same, fedspine__score=score) for score in ("mask", "exact")
        )
        documents = [
            [structures(folder, client) for client in range(4)] for folder in (by_masks, by_lora)
        ]
        assert [own["pruned"] for own in documents[0]] == [own["pruned"] for own in documents[1]]
        assert [own["structure"] for own in documents[0]] != [
            own["structure"] for own in documents[1]
        ]

    # ----- agreement before a round ---------------------------------------------------------------

    def test_schedule_asks_equal_shares_within_unit(self, bench: Bench) -> None:
        """Two rounds prune 12.5% and 25% of 3840 parameters; all ranks are equal."""
        changes = {
            **SHARES,
            "fedspine__allocation": "fixed",
            "fedspine__rank": 3,
            "federation__rounds": 4,
        }
        grid = bench.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        folder = bench.run(grid, **changes)
        asked = [
            (r.header.server_round, r.fields["pruned"])
            for r in map(opened, requests)
            if "pruned" in r.fields
        ]
        assert asked == [(2, 0.125)] * 4 + [(3, 0.25)] * 4
        limits = {
            (r.header.kind, r.fields["rank_limit"])
            for r in map(opened, requests)
            if "rank_limit" in r.fields
        }
        assert limits == {("train", 3), ("fetch", 3), ("deliver", 3)}
        for note in refinements(folder):
            least = {1: 0, 2: 480, 3: 960, 4: 960}[note["round"]]
            spent = [round(device["pruned"] * 3840) for device in note["devices"].values()]
            assert all(least <= parameters < least + GROUP for parameters in spent)
            assert {device["rank"] for device in note["devices"].values()} == {3}

    def test_who_has_not_come_to_the_share_is_told(
        self, bench: Bench, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # With two pruning rounds the steps are smaller than the target.
        bench.run(**{**SHARES, "fedspine__prune_rounds": 2})
        told = " ".join(capsys.readouterr().out.split())
        assert (
            "4 of 4 clients did not reach fedspine.pruning-ratio = 0.25; raise federation.rounds"
            in told
        )
        bench.run(**{**SHARES, "fedspine__allocation": "fixed", "fedspine__prune_rounds": 1})
        assert "did not reach" not in capsys.readouterr().out

    def test_question_precedes_parts_with_bits(self, plain: Uninterrupted) -> None:
        """Each block is one part: the first travels by ``deliver``, the last with ``train``.

        Replies are split in the same way.
        """
        asked = [opened(request) for request in plain.requests]
        second = [
            body for body in asked if body.header.server_round == 2 and body.header.client == 0
        ]
        kinds = [(body.header.kind, body.header.part, sorted(body.blobs)) for body in second]
        first = ["block-0000", "structure"]
        last = ["block-0001", "structure"]
        assert kinds == [
            ("deliver", 0, ["structure"]),
            ("deliver", 1, first),
            ("train", 0, last),
            ("fetch", 1, ["structure"]),
        ]
        # The bits before the answer differ from those after it.
        assert len({body.blobs["structure"] for body in second}) == 2
        assert not any("structure" in body.blobs for body in asked if body.header.server_round < 2)

    def test_share_of_zero_prunes_nothing(self, bench: Bench) -> None:
        """This is the paper's method without A_P."""
        changes = {"fedspine__pruning_ratio": 0.0, "federation__rounds": 3, "lora__rank": 8}
        folder = bench.run(**changes)
        assert [structures(folder, client)["pruned"] for client in range(4)] == [0.0] * 4
        devices = [device for note in refinements(folder) for device in note["devices"].values()]
        assert {device["pruned"] for device in devices} == {0.0}
        assert len({device["rank"] for device in devices}) > 1

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda bits: bits & bits - 1, "less is cut than the share"),
            # Set the bit of the first channel that is left.
            (lambda bits: bits | (~bits & -4) & -(~bits & -4), "more is cut than the share"),
            (lambda bits: bits | 1 << UNITS, "bits are set beyond the last group"),
            (lambda bits: bits | 3, "all groups of block 0 are cut"),
        ],
    )
    def test_wrong_cut_drops_its_sender_alone(
        self, bench: Bench, spoil: Callable[[int], int], words: str
    ) -> None:
        changes = {**SHARES, "federation__rounds": 3, "fedspine__allocation": "fixed"}
        grid = bench.grid(**changes)
        grid.tamper[2] = in_bits(spoil)
        clients = summary(bench.run(grid, **changes))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "completed",
            "dropped",
            "completed",
        ]
        assert clients[2]["reason"].startswith("deliver: reply refused")
        assert words in clients[2]["reason"]

    def test_what_was_cut_does_not_come_back(self, bench: Bench) -> None:
        changes = {**SHARES, "federation__rounds": 3, "fedspine__allocation": "fixed"}
        cut = list[int]()

        def turned(bits: int) -> int:
            cut.append(bits)
            return bits if len(cut) == 1 else bits & ~cut[0]

        grid = bench.grid(**changes)
        grid.tamper[1] = in_bits(turned)
        assert (
            "groups that were cut before have come back"
            in summary(bench.run(grid, **changes))["clients"][1]["reason"]
        )

    def test_a_cut_is_told_once_in_a_round(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        grid = bench.grid(**SHARES)
        asked = list[Message]()

        def note(message: Message) -> None:
            if "pruned" in read(message.content).fields:
                asked.append(message)

        grid.before_push = note
        bench.run(grid, **SHARES)
        grid.before_push = lambda _: None
        body = read(asked[0].content)
        first = next(
            read(reply.content)
            for client, reply in grid.received
            if client == body.header.client and "structure" in read(reply.content).blobs
        )
        context = grid.contexts[asked[0].metadata.dst_node_id]
        assert read(grid.answer(asked[0], context).content).blobs == first.blobs
        other = MessageBody(body.header, {"pruned": body.fields["pruned"] / 2}, body.blobs)
        reply = read(
            grid.answer(
                Message(write(other), dst_node_id=1, message_type="query.deliver"), context
            ).content
        )
        assert "answered another request of round 2" in reply.fields["reason"]
        beyond = MessageBody(body.header, {"pruned": 0.5}, body.blobs)
        reply = read(
            grid.answer(
                Message(write(beyond), dst_node_id=1, message_type="query.deliver"), context
            ).content
        )
        assert "pruned is above the run's pruning ratio" in reply.fields["reason"]

    def test_device_recovers_its_cut_from_server(self, bench: Bench) -> None:
        changes = {**SHARES, "federation__rounds": 3, "fedspine__allocation": "fixed"}
        grid = bench.grid(**changes)

        def lose(message: Message) -> None:
            body = read(message.content)
            if "pruned" in body.fields and (
                body.header.server_round,
                body.header.client,
            ) == (3, 1):
                shutil.rmtree(bench.folder / "state" / body.header.lineage / "node-00001")

        grid.before_push = lose
        folder = bench.run(grid, **changes)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        (told,) = [event for event in events(folder) if event["event"] == "kept_cut"]
        assert (told["client"], told["round"]) == (1, 3)
        _, second, third = refinements(folder)
        kept = {client: device["kept_its_cut"] for client, device in third["devices"].items()}
        assert kept == {"0": False, "1": True, "2": False, "3": False}
        assert third["devices"]["1"]["pruned"] == second["devices"]["1"]["pruned"]
        assert third["devices"]["0"]["pruned"] > second["devices"]["0"]["pruned"]

    # ----- aggregation at the server --------------------------------------------------------------

    @pytest.mark.parametrize("aggregation", ["coverage", "zero-fill"])
    def test_rows_are_averaged_over_their_keepers(self, bench: Bench, aggregation: str) -> None:
        """The expected mean comes from dense updates, row by row.

        The weights are computed by hand from the reports and the sent tensors.
        """
        changes = {"fedspine__aggregation": aggregation, "fedspine__allocation": "random"}
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        sent = sent_adapters(grid, 2)
        reports = [read(reply.content) for _, reply in grid.received]
        taylor = {
            body.header.client: body.fields["taylor"]
            for body in reports
            if (body.header.kind, body.header.server_round) == ("train", 2)
        }
        dense = {client: dense_updates(folder, client, own) for client, own in sent.items()}
        spectral = {
            client: np.mean([nuclear(own) for own, _ in updates.values()])
            for client, updates in dense.items()
        }
        weights = {
            client: (
                taylor[client] / np.mean(list(taylor.values()))
                + spectral[client] / np.mean(list(spectral.values()))
            )
            for client in sent
        }
        told = refinements(folder)[1]["devices"]
        assert {int(client): own["importance"] for client, own in told.items()} == pytest.approx(
            weights, rel=1e-3
        )
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

    # ----- variants -------------------------------------------------------------------------------

    def test_schedule_replaces_missing_half(self, bench: Bench) -> None:
        def arms(**changes: Any) -> list[dict[str, Any]]:
            folder = bench.run(**changes)
            return list(
                find(
                    json.loads((folder / "checkpoint" / "state.json").read_text()), "arms"
                ).values()
            )

        found = arms(fedspine__adaptive_pruning=False)
        # One round of pruning reaches half of the target, because there are two.
        assert {arm["pruned"] for arm in found} == {0.25}
        assert len({arm["rank"] for arm in found}) > 1
        found = arms(fedspine__adaptive_rank=False, fedspine__rank=3)
        assert {arm["rank"] for arm in found} == {3}
        assert len({arm["pruned"] for arm in found}) > 1

    @pytest.mark.parametrize(
        "changes",
        [
            {
                "fedspine__arm_space": "absolute",
                "fedspine__reward": "literal",
                "federation__rounds": 3,
            },
            pytest.param(
                {
                    "fedspine__score": "group",
                    "fedspine__normalise": False,
                    "federation__wire_dtype": "bfloat16",
                },
                marks=pytest.mark.slow,
            ),
            {
                "federation__wire_dtype": "nf4",
                "fedspine__selection": "block",
                "federation__client_weights": "importance-samples",
            },
            pytest.param(
                {
                    "federation__fleet": "measured",
                    "federation__client_weights": "equal",
                    "federation__sampled_clients": 0.5,
                },
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_other_ways_work(self, bench: Bench, changes: dict[str, Any]) -> None:
        assert {client["status"] for client in summary(bench.run(**changes))["clients"]} == {
            "completed"
        }

    def test_devices_score_their_models_on_task_items(self, bench: Bench) -> None:
        """Devices evaluate their own models on the server's items.

        On their own items they also evaluate the dense model.
        """
        generator = random.Random(0)

        def reviews(number: int) -> str:
            labelled = (
                (" ".join(generator.choices(WORDS, k=4)), generator.randrange(2))
                for _ in range(number)
            )
            return "".join(
                json.dumps({"sentence": words, "label": label}) + "\n" for words, label in labelled
            )

        for client in range(bench.num_clients):
            (bench.folder / f"items-{client}.jsonl").write_text(reviews(40))
        (bench.folder / "tests.jsonl").write_text(reviews(12))
        changes = {
            "task__name": "sst2",
            "task__max_tokens": 48,
            "task__test_path": str(bench.folder / "tests.jsonl"),
            "data__source": "files",
            "data__path": str(bench.folder / "items-{client}.jsonl"),
            "evaluation__local_baseline": True,
            "evaluation__every": 2,
        }
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config.pop("data-path")
        folder = bench.run(grid, **changes)
        document, (look,) = (
            summary(folder),
            json.loads((folder / "rounds.json").read_text())["rounds"],
        )
        found = {
            metric["name"]: metric["values"]
            for metric in document["metrics"]
            if metric["dataset"] == "sst2"
        }
        told = [client["metrics"]["acc/sst2"] for client in document["clients"]]
        assert found["acc"]["federated"] == pytest.approx(np.mean(told), abs=1e-3)
        assert found["acc"]["dense"] is not None
        assert list(look["scores"]["acc"].values()) == pytest.approx(told, abs=1e-3)

    def test_one_client_twice_gives_the_same_bytes(self, bench: Bench) -> None:
        bench.num_clients = 1
        assert model_files(bench.run()) == model_files(bench.run())

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"lora__targets": "attn.q,attn.v"},
                "measures channels by adapters that lie on them, and block 0 has none on mlp",
            ),
            (
                {"lora__layers": "1"},
                "measures groups by adapters that lie on them, and block 0 has none",
            ),
            ({"fedspine__pruning_ratio": 0.8}, r"fedspine.pruning-ratio = 0.8"),
            ({"federation__rounds": 1}, "fedspine prunes from round 2 on"),
            ({"lora__merge": True}, "clients of fedspine end with models of different shapes"),
            ({"fedspine__rank": 5}, "fedspine.rank = 5: the adapters' largest rank is 4"),
            (
                {"fedspine__adaptive_rank": False, "fedspine__adaptive_pruning": False},
                "neither ratio nor rank is chosen",
            ),
            (
                {"fedspine__adaptive_rank": False, "fedspine__pruning_ratio": 0.0},
                "neither ratio nor rank is chosen",
            ),
            (
                {"fedspine__reward": "literal", "fedspine__pruning_ratio": 0.0},
                "all rewards would be 0",
            ),
            (
                {"fedspine__allocation": "fixed", "fedspine__prune_rounds": 50},
                "and no device comes to the share",
            ),
            (
                {"fedspine__allocation": "fixed", "fedspine__prune_from": 50},
                "fedspine.prune-rounds = 0, which is",
            ),
            (
                {"fedspine__adaptive_pruning": False, "fedspine__prune_rounds": 2},
                "pruning would end in round 3 of 2",
            ),
            (
                {"fedspine__prune_from": 3},
                "fedspine.prune-from = 3: where ratios are chosen pruning begins in round 2",
            ),
            (
                {"fedspine__prune_rounds": 3},
                "not even the largest arms come to the share; lower it to 2 or less",
            ),
            (
                {"fedspine__channel_multiple": 16, "fedspine__pruning_ratio": 0.45},
                r"16 channels \(channel-multiple\) of each block",
            ),
            ({"federation__fleet": ""}, "federation.fleet = ''"),
            (
                {"federation__fleet": "none.toml"},
                "federation.fleet = 'none.toml': there is no none.toml; conf/devices has some",
            ),
            (
                {"federation__fleet": "a" * 300},
                f"federation.fleet = '{'a' * 300}': .* cannot be read: File name too long",
            ),
            (
                {"training__steps": 1},
                (
                    "training.steps = 1: a bandit learns from how far the loss falls within a"
                    " round; set it to 2"
                ),
            ),
            ({"training__base": "nf4"}, "has 16 input features, which is not a multiple of 64"),
        ],
    )
    def test_incompatible_settings_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(bench.grid(), **changes)
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize(
        "changes",
        [
            {
                "fedspine__selection": "block",
                "fedspine__pruning_ratio": 0.3,
                "federation__rounds": 3,
            },
            pytest.param(
                {
                    "fedspine__selection": "global",
                    "fedspine__adaptive_pruning": False,
                    "federation__rounds": 4,
                },
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {
                    "fedspine__allocation": "fixed",
                    "fedspine__pruning_ratio": 0.1,
                    "fedspine__prune_rounds": 3,
                    "federation__rounds": 4,
                },
                marks=pytest.mark.slow,
            ),
            {
                "fedspine__allocation": "fixed",
                "fedspine__channel_multiple": 5,
                "federation__rounds": 4,
            },
        ],
        ids=[
            "units of a block compete",
            "all compete, ranks are chosen",
            "steps below a unit",
            "multiples of channels",
        ],
    )
    def test_plans_of_other_cuts_equal_their_runs(
        self, bench: Bench, changes: dict[str, Any]
    ) -> None:
        """The server does not ask for a step that previous cuts already cover."""
        assert_planned(bench, bench.run(**changes), **changes)

    @pytest.mark.parametrize("selection", ["global", pytest.param("block", marks=pytest.mark.slow)])
    def test_plan_bounds_hold_for_uneven_parts(
        self, home: Home, tmp_path: Path, selection: str
    ) -> None:
        """Blocks lose different numbers of groups if all groups compete.

        Other blobs then share a part, and each part carries the bits of the cut.
        """
        changes = {
            "part_bytes": 97152, "lora__targets": "attn.v,mlp.down", "fedspine__selection": selection,
            "fedspine__pruning_ratio": 0.1,
            "fedspine__allocation": "fixed", "fedspine__prune_rounds": 1, "federation__rounds": 4,
        }  # fmt: skip
        wide = save_tiny_llama(tmp_path / "wide", blocks=8, feed_forward=4000)
        bench = Bench(
            tmp_path, self.method, self.settings, num_clients=2, home=Home(wide, home.public)
        )
        assert_planned(bench, bench.run(**changes), **changes)

    def test_changed_fleet_is_refused_on_resumption(self, bench: Bench) -> None:
        fleet = bench.folder / "fleet.toml"
        given = Path(__file__).parents[4] / "conf" / "devices"
        fleet.write_text((given / "low.toml").read_text())
        changes = {"federation__fleet": str(fleet)}
        folder = bench.killed(lambda header: header.server_round == 2, **changes)
        fleet.write_text((given / "high.toml").read_text())
        with pytest.raises(
            EspalierError, match="is not the fleet that the run began with; restore its file"
        ):
            bench.run(resume_from=str(folder), **changes)

    def test_importance_is_revealed_by_one_cut_only(self, bench: Bench) -> None:
        """A server that asks for other ratios in every round learns nothing more.

        There is no training between the rounds.
        """
        grid = bench.grid(federation__rounds=6)
        asked = list[Message]()
        grid.before_push = lambda message: asked.append(message)
        bench.killed(
            lambda header: (header.kind, header.server_round) == ("train", 2),
            grid,
            federation__rounds=6,
        )
        question = next(opened(message) for message in asked if "pruned" in opened(message).fields)
        context = grid.contexts[
            next(m for m in asked if "pruned" in opened(m).fields).metadata.dst_node_id
        ]
        before = unpack_tensors(question.blobs["structure"])[CUT]
        for server_round, pruned in ((3, 0.05), (4, 0.2), (5, 0.25)):
            header = question.header.model_copy(update={"server_round": server_round})
            content = write(MessageBody(header, {"pruned": pruned}, question.blobs))
            reply = read(
                grid.answer(
                    Message(content, dst_node_id=context.node_id, message_type="query.deliver"),
                    context,
                ).content
            )
            assert np.array_equal(unpack_tensors(reply.blobs["structure"])[CUT], before)

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

    def test_simulation_beyond_its_fleet_is_refused(self, bench: Bench) -> None:
        with pytest.raises(
            EspalierError,
            match=r"'auto' \(in a simulation full\): num-clients = 81: the fleet has 80 devices",
        ):
            bench.run(num_clients=81)
        assert not (bench.folder / "runs").exists()

    def test_encoder_task_and_fleet_size_are_checked(self, bench: Bench) -> None:
        with pytest.raises(
            EspalierError,
            match=r"task.name = 'text': an encoder only classifies; choose sst2, mnli, boolq or class",
        ):
            bench.run(model=str(save_tiny_roberta(bench.folder / "encoder")))
        with pytest.raises(
            EspalierError,
            match=r"federation.fleet = 'low': num-clients = 11: the fleet has 10 devices",
        ):
            bench.run(num_clients=11, federation__fleet="low")


def test_a_base_in_nf4_keeps_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention group of 2 queries of width 32 has 64 features; 128 of 192 channels stay."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = Bench(
        tmp_path, "fedspine", TestFedSpine.settings | {"training.base": "nf4"}, num_clients=2
    )
    model = str(save_tiny_llama(tmp_path / "wide", hidden=128, feed_forward=192))
    with pytest.raises(
        EspalierError, match=r"channel-multiple = 1: with training.base = 'nf4' .* set it to 64"
    ):
        bench.run(model=model)
    folder = bench.run(model=model, fedspine__channel_multiple=64, fedspine__allocation="fixed")
    # Only the whole model is quantized.
    assert len(list((tmp_path / "state" / "quantised").iterdir())) == 1
    for block in structures(folder, 1)["structure"]["blocks"]:
        assert (len_of(block["groups"]), len_of(block["channels"])) == (1, 128)


def test_run_without_devices_ends_with_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = Bench(tmp_path, "fedspine", TestFedSpine.settings, num_clients=2)
    grid = bench.grid()
    for client in range(2):
        grid.tamper[client] = in_bits(lambda bits: 3)
    with pytest.raises(RunFailed, match="all groups of block 0 are cut"):
        bench.run(grid)


# ----- helpers ------------------------------------------------------------------------------------


def opened(message: Message) -> MessageBody:
    return read(message.content)


def refinements(folder: Path) -> list[dict[str, Any]]:
    """Return the notes of every round."""
    found: list[dict[str, Any]] = json.loads((folder / "refinements.json").read_text())["rounds"]
    return found


def structures(folder: Path, client: int) -> dict[str, Any]:
    """Return the document of a device's structure."""
    found: dict[str, Any] = json.loads(
        (folder / "structures" / f"client-{client:04d}.json").read_text()
    )
    return found


def find(document: Any, key: str) -> Any:
    """Return the value of a key anywhere in a JSON document."""
    if isinstance(document, dict):
        if key in document:
            return document[key]
        return next(
            (found for value in document.values() if (found := find(value, key)) is not None), None
        )
    return None


def len_of(ranges: str) -> int:
    """Return the number of integers that ranges such as ``0-3,7`` contain."""
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)


def in_bits(spoil: Callable[[int], int]) -> Callable[[Message, Message], Message]:
    """Return a tamper that changes the bits of a device's cut."""

    def tamper(request: Message, reply: Message) -> Message:
        body = read(reply.content)
        if body.header.kind != "deliver" or "structure" not in body.blobs:
            return reply
        (bits,) = unpack_tensors(body.blobs["structure"])[CUT].tolist()
        body.blobs["structure"] = pack_tensors({CUT: np.array([spoil(bits)], np.uint64)})
        return Message(write(body), reply_to=request)

    return tamper


def importances(run: Uninterrupted, client: int) -> torch.Tensor:
    """Return a device's importance scores after the last round, from its client state."""
    (folder,) = (run.bench.folder / "state").glob(f"*/node-{client:05d}/lasting")
    document = json.loads((folder / "importance.json").read_text())
    return load((folder / f"{document['kept'][-1]['blobs']['groups']}.blob").read_bytes())["values"]


def kept_of(folder: Path, client: int) -> list[dict[str, list[bool]]]:
    """Return which rows or columns of each block's matrices a device keeps, by matrix name."""
    structure = Structure.from_json(structures(folder, client)["structure"], "here")
    found = []
    for block in structure.blocks:
        # The model has 4 heads of width 4 in 2 groups.
        queries = [row // 8 in block.groups for row in range(16)]
        keys = [row // 4 in block.groups for row in range(8)]
        channels = [row in block.channels for row in range(24)]
        found.append(
            {"attn.q": queries, "attn.k": keys, "attn.v": keys, "attn.o": queries}
            | dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), channels)
        )
    return found


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
