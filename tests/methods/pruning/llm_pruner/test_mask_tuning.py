"""Mask tuning (LLM-Pruner): promises of every method in two rounds, and stages by hand.

Each stage is compared with models in memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.cuts import scales_of
from espalier.messages.message import MessageBody
from espalier.messages.records import read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from tests.bench import Bench, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.pruning.llm_pruner.mask_tuning_runs import SMALL, MaskTuningRuns
from tests.methods.pruning.llm_pruner.test_llm_pruner import SIDES, searched_by_hand
from tests.methods.pruning.test_flap import all_samples

DAMPING = 0.01
PLACES = [(index, kind) for index in range(2) for kind in SIDES]


def mask_gradients(bench: Bench, samples: torch.Tensor) -> dict[tuple[int, str], np.ndarray]:
    """Return the gradients of each sample's loss by masks of ones, shape (samples, groups)."""
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    masks = {}
    for index, kind in PLACES:
        path, number, size = SIDES[kind]
        mask = masks[index, kind] = torch.ones(number, requires_grad=True)

        def masked(_: Any, inputs: Any, mask: torch.Tensor = mask, size: int = size) -> Any:
            return (inputs[0] * mask.repeat_interleave(size),)

        model.model.layers[index].get_submodule(path).register_forward_pre_hook(masked)
    found: dict[tuple[int, str], list[np.ndarray]] = {place: [] for place in PLACES}
    for sample in samples:
        gradients = torch.autograd.grad(
            model(input_ids=sample[None], labels=sample[None]).loss, list(masks.values())
        )
        for place, gradient in zip(PLACES, gradients, strict=True):
            found[place].append(gradient.double().numpy())
    return {place: np.array(rows) for place, rows in found.items()}


def rearranged_by_hand(information: np.ndarray, cut: set[int]) -> set[int]:
    """Return the cut after rearrangement.

    Each group that stays is cut in turn. Of all cut groups, the one whose return lowers the loss
    most comes back.
    """

    def lost(units: set[int]) -> float:
        return sum(information[one, other] for one in units for other in units)

    cut = set(cut)
    for unit in sorted(
        set(range(len(information))) - cut, key=lambda unit: information[unit, unit]
    ):
        cut.add(unit)
        cut.remove(min(cut, key=lambda back: lost(cut - {back})))
    return cut


@torch.no_grad()
def outputs_by_hand(
    bench: Bench, samples: torch.Tensor, kept: dict[tuple[int, str], list[int]]
) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    """Return, in the cut model, the outputs of the groups that stay and of all groups.

    Outputs have shape (tokens x width, groups).
    """
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    found = {}
    for place in PLACES:
        path, _, size = SIDES[place[1]]

        def silence(
            module: Any, inputs: Any, place: tuple[int, str] = place, size: int = size
        ) -> Any:
            tokens = inputs[0].flatten(0, -2).double()
            weight = module.weight.double()
            columns = {unit: range(unit * size, (unit + 1) * size) for unit in kept[place]}
            given = [
                (tokens[:, list(own)] @ weight[:, list(own)].T).flatten()
                for own in columns.values()
            ]
            found[place] = (
                torch.stack(given, dim=1).numpy(),
                (tokens @ weight.T).flatten().numpy(),
            )
            silent = torch.zeros(tokens.shape[1])
            silent[[column for own in columns.values() for column in own]] = 1
            return (inputs[0] * silent,)

        model.model.layers[place[0]].get_submodule(path).register_forward_pre_hook(silence)
    model(input_ids=samples, use_cache=False)
    return found


def symmetric(triangle: np.ndarray, width: int) -> np.ndarray:
    full = np.zeros((width, width))
    full[np.triu_indices(width)] = triangle
    return full + np.triu(full, 1).T


class TestMaskTuning(MaskTuningRuns, Promises):
    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return an order with another cut: another channel of the first block stays."""
        if not order.blobs:
            return []
        blobs = dict(order.blobs)
        tensors = {
            name: value.copy() for name, value in unpack_tensors(blobs["block-0000"]).items()
        }
        tensors["channels.cut"] ^= np.uint64(1)
        return [
            MessageBody(order.header, order.fields, blobs | {"block-0000": pack_tensors(tensors)})
        ]

    @pytest.fixture(scope="class")
    @classmethod
    def by_hand(cls, plain: Uninterrupted) -> list[dict[tuple[int, str], np.ndarray]]:
        """Return each client's gradients of masks."""
        return [mask_gradients(plain.bench, own) for own in cls.samples(plain.bench)]

    @staticmethod
    def samples(bench: Bench) -> tuple[torch.Tensor, ...]:
        changes = {"data__source": "files", "data__path": f"{bench.folder}/text-{{client}}.txt"}
        return all_samples(bench, **changes).chunk(bench.num_clients)

    @staticmethod
    def kept(folder: Path) -> dict[tuple[int, str], list[int]]:
        structure = OpenedModel(folder / "model").structure
        assert structure is not None
        return {(index, kind): list(structure.blocks[index].kept(kind)) for index, kind in PLACES}

    def test_factors_give_fisher_information(
        self, plain: Uninterrupted, by_hand: list[dict[tuple[int, str], np.ndarray]]
    ) -> None:
        """The factor of two samples has two rows.

        The products of its rows equal the mean products of the samples' gradients.
        """
        for client, reply in plain.received:
            body = read(reply.content)
            for key, blob in body.blobs.items() if body.header.server_round == 1 else ():
                for kind, (_, number, _) in SIDES.items():
                    gradients = by_hand[client][int(key[-4:]), kind]
                    rows = np.zeros((2, number))
                    rows[np.triu_indices(2, 0, number)] = unpack_tensors(blob)[f"{kind}.fisher"]
                    np.testing.assert_allclose(
                        rows.T @ rows, gradients.T @ gradients / 2, rtol=5e-3, atol=1e-8
                    )

    def test_units_chosen_by_search_are_removed(
        self, plain: Uninterrupted, by_hand: list[dict[tuple[int, str], np.ndarray]]
    ) -> None:
        rows = {place: np.vstack([own[place] for own in by_hand]) for place in PLACES}
        information = {place: found.T @ found for place, found in rows.items()}
        scores = {
            (*place, unit): found[unit, unit]
            for place, found in information.items()
            for unit in range(len(found))
        }
        searched = searched_by_hand(scores)
        moved = 0
        for place, stay in self.kept(plain.folder).items():
            start = {unit for *of, unit in searched if tuple(of) == place}
            expected = rearranged_by_hand(information[place], start)
            assert set(range(len(information[place]))) - set(stay) == expected
            moved += len(expected - start)
        assert moved > 0

    def test_equations_equal_cut_model_in_memory(self, plain: Uninterrupted) -> None:
        kept = self.kept(plain.folder)
        outputs = [outputs_by_hand(plain.bench, own, kept) for own in self.samples(plain.bench)]
        sent = 0
        for client, reply in plain.received:
            body = read(reply.content)
            for key, blob in body.blobs.items() if body.header.server_round == 2 else ():
                tensors = unpack_tensors(blob)
                place = (int(key[6:10]), key[11:])
                given, wanted = outputs[client][place]
                joint = symmetric(tensors["joint"], len(kept[place]))
                np.testing.assert_allclose(joint, given.T @ given / 32, rtol=1e-3, atol=1e-6)
                np.testing.assert_allclose(
                    tensors["aims"], given.T @ wanted / 32, rtol=1e-3, atol=1e-6
                )
                sent += 1
        lost = [place for place in PLACES if len(kept[place]) < SIDES[place[1]][1]]
        assert sent == 4 * len(lost) > 0
        written = AutoModelForCausalLM.from_pretrained(
            plain.folder / "model", dtype=torch.float32, trust_remote_code=True
        )
        dense = AutoModelForCausalLM.from_pretrained(plain.bench.model, dtype=torch.float32)
        for index, kind in PLACES:
            path, _, size = SIDES[kind]
            stay = kept[index, kind]
            given, wanted = (
                np.concatenate([own[index, kind][side] for own in outputs]) for side in range(2)
            )
            weight = np.sqrt(DAMPING * np.square(given).sum(axis=0).mean())
            rows = np.vstack([given, weight * np.eye(len(stay))])
            scales = np.linalg.lstsq(
                rows, np.concatenate([wanted, weight * np.ones(len(stay))]), rcond=None
            )[0]
            scales = scales if (index, kind) in lost else np.ones(len(stay))
            columns = [unit * size + at for unit in stay for at in range(size)]
            before = dense.model.layers[index].get_submodule(path).weight[:, columns].detach()
            expected = before * torch.from_numpy(scales).float().repeat_interleave(size)
            found = written.model.layers[index].get_submodule(path).weight.detach()
            torch.testing.assert_close(found, expected.bfloat16().float(), rtol=1e-2, atol=1e-4)
        assert summary(plain.folder)["report"]["scales_of_blocks"]

    def test_what_is_pushed_is_what_is_written(self, whole: Uninterrupted) -> None:
        """Pushed tensors include the scales, because clients evaluate the federated model.

        ``test_own_text_figures_equal_transformers`` compares the metrics.
        """
        pushed = [read(request.content) for request in whole.requests]
        bodies = [body for body in pushed if body.header.kind == "push" and body.header.client == 0]
        blobs = {key: blob for body in bodies for key, blob in body.blobs.items()}
        for place, stay in self.kept(whole.folder).items():
            scales = scales_of(unpack_tensors(blobs[f"block-{place[0]:04d}"]))[place[1]]
            assert set(np.flatnonzero(scales)) == set(stay)

    @pytest.mark.parametrize("clients", [1, 4])
    def test_federation_equals_single_party(self, bench: Bench, clients: int) -> None:
        """A federation of one client is that party."""
        changes: dict[str, Any] = {
            "data__source": "files",
            "data__path": f"{bench.folder}/text-{{client}}.txt",
        }
        changes |= {
            "evaluation__centralized": "auto",
            "evaluation__local_baseline": True,
            "data__num_samples": 3,
        }
        bench.num_clients = clients
        (metric,) = summary(bench.run(**changes))["metrics"]
        values = metric["values"]
        assert values["centralized"] == pytest.approx(values["federated"], rel=1e-4)
        # Clients round losses to three decimals.
        if clients == 1:
            assert values["local_baseline"] == pytest.approx(values["federated"], rel=1e-3)
        assert values["federated"] != pytest.approx(values["dense"], rel=1e-3)

    def test_without_rescaling_there_is_one_round(self, bench: Bench) -> None:
        bench.settings = {**SMALL, "llm-pruner.rearrange": "groups"}
        grid = bench.grid(evaluation__local_baseline=True)
        document = summary(bench.run(grid, evaluation__local_baseline=True))
        kinds = [read(reply.content).header.kind for _, reply in grid.received]
        assert (kinds.count("train"), kinds.count("local_baseline")) == (4, 0)
        names = {
            n
            for _, reply in grid.received
            for b in read(reply.content).blobs.values()
            for n in unpack_tensors(b)
        }
        assert names == {"groups.score", "channels.score", "groups.fisher"}
        assert {client["status"] for client in document["clients"]} == {"completed"}
        assert "scales_of_blocks" not in document["report"]
