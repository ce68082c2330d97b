"""LLM-Pruner: promises of every method, and scores compared with autograd on the whole model."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from transformers import AutoModelForCausalLM

from espalier.errors import EspalierError
from espalier.hf.group_scores.taylor import taylor_scores
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.records import STYPE, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.storage.blobs import sha256
from tests.bench import Bench, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.pruning.test_flap import all_samples

ROWS = {
    "groups": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "channels": ("mlp.gate_proj", "mlp.up_proj"),
}
UNLIMITED = {"federation__max_weight_ratio": 1000.0, "federation__max_update_ratio": 1000.0}
COLUMNS = {"groups": "self_attn.o_proj", "channels": "mlp.down_proj"}
SIZES = {"self_attn.q_proj": 8, "self_attn.k_proj": 4, "self_attn.v_proj": 4, "self_attn.o_proj": 8}


def scores_by_hand(
    bench: Bench, samples: torch.Tensor, signed: bool
) -> list[dict[str, list[float]]]:
    """Return weight times gradient of the mean loss, summed by prunable group."""
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    model(input_ids=samples, labels=samples).loss.backward()
    found = []
    for block in model.model.layers:
        products = {
            name: (m.weight * m.weight.grad).detach()
            for name, m in block.named_modules()
            if hasattr(m, "weight")
        }
        products = products if signed else {name: value.abs() for name, value in products.items()}
        own: dict[str, list[float]] = {}
        for kind, number in (("groups", 2), ("channels", 24)):
            own[kind] = [0.0] * number
            for unit in range(number):
                for name in ROWS[kind]:
                    size = SIZES.get(name, 1)
                    own[kind][unit] += float(products[name][unit * size : (unit + 1) * size].sum())
                size = SIZES.get(COLUMNS[kind], 1)
                own[kind][unit] += float(
                    products[COLUMNS[kind]][:, unit * size : (unit + 1) * size].sum()
                )
        found.append(own)
    return found


SIDES = {"groups": ("self_attn.o_proj", 2, 8), "channels": ("mlp.down_proj", 24, 1)}
"""Module whose input has the mask, number of groups and width of a group, by kind."""
COSTS = {"groups": 16 * 8 + 2 * 16 * 4 + 16 * 8, "channels": 3 * 16}


def fisher_by_hand(bench: Bench, samples: torch.Tensor) -> list[dict[str, list[float]]]:
    """Return the squared gradients of masks of ones, summed one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    masks = {}
    for index, block in enumerate(model.model.layers):
        for kind, (path, number, size) in SIDES.items():
            mask = masks[index, kind] = torch.ones(number, requires_grad=True)

            def masked(_: Any, inputs: Any, mask: torch.Tensor = mask, size: int = size) -> Any:
                return (inputs[0] * mask.repeat_interleave(size),)

            block.get_submodule(path).register_forward_pre_hook(masked)
    found = {key: torch.zeros_like(mask) for key, mask in masks.items()}
    for sample in samples:
        gradients = torch.autograd.grad(
            model(input_ids=sample[None], labels=sample[None]).loss, list(masks.values())
        )
        for key, gradient in zip(found, gradients, strict=True):
            found[key] += gradient.square() / len(samples)
    return [{kind: found[index, kind].tolist() for kind in SIDES} for index in range(2)]


def searched_by_hand(scores: dict[tuple[int, str, int], float]) -> set[tuple[int, str, int]]:
    """Search for the cheapest cut by brute force.

    Every pair of group and channel counts that reaches 30% of the total cost is tried, lowest
    scores first. The pair with the lowest sum of scores is returned.
    """
    pools = {key[:2] for key in scores}
    stay = {
        max((key for key in scores if key[:2] == pool), key=lambda key: (scores[key], key))
        for pool in pools
    }
    free = sorted(scores.keys() - stay, key=lambda key: scores[key])
    order = {kind: [key for key in free if key[1] == kind] for kind in SIDES}
    target = 0.3 * sum(COSTS[kind] for _, kind, _ in scores)
    choices = [
        {*order["groups"][:a], *order["channels"][:b]}
        for a in range(len(order["groups"]) + 1)
        for b in range(len(order["channels"]) + 1)
        if a * COSTS["groups"] + b * COSTS["channels"] >= target
    ]
    return min(choices, key=lambda choice: sum(scores[key] for key in choice))


class TestLlmPruner(Promises):
    """Federations with one round; both blocks of the tiny model may be pruned."""

    method = "llm-pruner"
    settings: ClassVar[dict[str, Any]] = {
        "pruning.ratio": 0.3,
        "llm-pruner.spare-first": 0,
        "llm-pruner.spare-last": 0,
    }
    last_round = 1
    cuts_samples = "calibration_samples"

    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return no orders: the content of an order is empty."""
        return []

    @pytest.mark.parametrize("element", ["absolute", "signed"])
    def test_scores_equal_autograd_and_are_summed(self, bench: Bench, element: str) -> None:
        """The lowest groups of each kind and block are pruned until 30% of their cost is reached.

        Signed sums count by their magnitude.
        """
        changes = {
            "data__source": "files",
            "data__path": f"{bench.folder}/text-{{client}}.txt",
            "llm_pruner__element": element,
        }
        changes |= {**UNLIMITED, "pruning__form": "compact", "pruning__selection": "kind"}
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        samples = all_samples(bench, **changes).chunk(4)
        expected = [scores_by_hand(bench, own, element == "signed") for own in samples]
        for client, reply in grid.received:
            body = read(reply.content)
            for key, blob in body.blobs.items() if body.header.kind == "train" else ():
                for kind, values in expected[client][int(key[-4:])].items():
                    np.testing.assert_allclose(
                        unpack_tensors(blob)[f"{kind}.score"], values, rtol=2e-3, atol=1e-6
                    )
        structure = OpenedModel(folder / "model").structure
        assert structure is not None
        for index, block in enumerate(structure.blocks):
            for kind, number, go in (("groups", 2, 1), ("channels", 24, 8)):
                sums = [
                    abs(sum(own[index][kind][unit] for own in expected)) for unit in range(number)
                ]
                assert list(block.kept(kind)) == sorted(
                    sorted(range(number), key=lambda unit: sums[unit])[go:]
                )

    def test_squares_are_the_fisher_information(self, bench: Bench) -> None:
        """Masks scale the outputs of the groups, and gradients are taken sample by sample.

        The search prunes the numbers of groups and channels with the lowest loss.
        """
        changes = {
            "data__source": "files",
            "data__path": f"{bench.folder}/text-{{client}}.txt",
            "llm_pruner__element": "squared",
        }
        changes |= {
            **UNLIMITED,
            "pruning__form": "compact",
            "pruning__selection": "search",
        }
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        expected = [fisher_by_hand(bench, own) for own in all_samples(bench, **changes).chunk(4)]
        for client, reply in grid.received:
            body = read(reply.content)
            for key, blob in body.blobs.items() if body.header.kind == "train" else ():
                for kind, values in expected[client][int(key[-4:])].items():
                    np.testing.assert_allclose(
                        unpack_tensors(blob)[f"{kind}.score"], values, rtol=2e-3, atol=1e-9
                    )
        structure = OpenedModel(folder / "model").structure
        assert structure is not None
        total = {
            (index, kind, unit): sum(own[index][kind][unit] for own in expected)
            for index in range(2)
            for kind, number in (("groups", 2), ("channels", 24))
            for unit in range(number)
        }
        kept = {
            (i, kind, unit)
            for i, block in enumerate(structure.blocks)
            for kind in SIDES
            for unit in block.kept(kind)
        }
        assert kept == total.keys() - searched_by_hand(total)

    def test_signed_sums_are_those_of_pooled_data(self, bench: Bench) -> None:
        changes = {
            "data__source": "files",
            "data__path": f"{bench.folder}/text-{{client}}.txt",
            "llm_pruner__element": "signed",
        }
        changes |= {"evaluation__centralized": "auto", **UNLIMITED}
        (metric,) = summary(bench.run(**changes))["metrics"]
        assert metric["values"]["centralized"] == pytest.approx(
            metric["values"]["federated"], rel=1e-5
        )

    def test_signed_sums_are_weighted_by_samples(self, bench: Bench) -> None:
        """A party with three samples counts three times as much as a party with one."""
        model = OpenedModel(bench.model)
        samples = all_samples(bench)[:4]
        job = LlmPrunerSettings.model_validate(
            {"element": "signed", "spare-first": 0, "spare-last": 0}
        )
        computing = Computing(torch.device("cpu"), torch.float32, 1)
        whole, *parts = (
            taylor_scores(model, computing, own, job, 2)
            for own in (samples, samples[:3], samples[3:])
        )
        for index, scores in whole.items():
            for kind, values in scores.items():
                torch.testing.assert_close(
                    parts[0][index][kind] + parts[1][index][kind], values, rtol=1e-4, atol=1e-5
                )

    def test_negative_magnitude_drops_its_sender(self, bench: Bench) -> None:
        def negate(request: Message, reply: Message) -> Message:
            if read(request.content).header.kind == "train":
                blobs = reply.content["blobs"]
                for key in blobs:
                    turned = {
                        name: -values for name, values in unpack_tensors(blobs[key].data).items()
                    }
                    blobs[key] = Array("", (), STYPE, pack_tensors(turned))
            return reply

        grid = bench.grid()
        grid.tamper[1] = negate
        clients = summary(bench.run(grid))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert "a score is not a finite number, or below 0" in clients[1]["reason"]

    def test_share_is_of_all_despite_spared_blocks(self, bench: Bench) -> None:
        folder = bench.run(**{"llm_pruner__spare_last": 1, "pruning__ratio": 0.2})
        small = OpenedModel(folder / "model")
        base = OpenedModel(bench.model)
        assert small.plan.blocks[1] == base.plan.blocks[1]
        cut = 1 - small.plan.num_weights / base.plan.num_weights
        assert 0.2 <= round(cut, 9) < 0.2 + 2 * 384 / base.plan.num_weights

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"llm_pruner__spare_first": 2},
                (
                    r"llm-pruner.spare-first = 2, llm-pruner.spare-last = 0: the model has 2"
                    r" blocks, of which none"
                ),
            ),
            (
                {"llm_pruner__spare_first": 1, "pruning__ratio": 0.6},
                r"pruning.ratio = 0.6: 120.0% of what can be removed",
            ),
        ],
    )
    def test_impossible_cuts_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(**changes)
        assert not (bench.folder / "runs").exists()

    def test_one_client_s_scores_are_capped(self, bench: Bench, plain: Uninterrupted) -> None:
        def shout(request: Message, reply: Message) -> Message:
            if read(request.content).header.kind == "train":
                blobs = reply.content["blobs"]
                hashes = list(reply.content["fields"]["blob_sha256"])
                for place, key in enumerate(sorted(blobs)):
                    loud = {
                        name: 1e6 * values
                        for name, values in unpack_tensors(blobs[key].data).items()
                    }
                    blobs[key] = Array("", (), STYPE, pack_tensors(loud))
                    hashes[place] = sha256(blobs[key].data)
                reply.content["fields"]["blob_sha256"] = hashes
            return reply

        grid = bench.grid()
        grid.tamper[1] = shout
        client = summary(bench.run(grid))["clients"][1]
        assert client["status"] == "completed"
        assert client["capped"]["scores"]["claimed"] > 1000 * client["capped"]["scores"]["counted"]
