"""Replies of mask tuning that are refused or limited."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from espalier.errors import EspalierError
from espalier.hf.group_scores.mask_tuning import scaled_cuts, scales_or_none
from espalier.messages.blobs.cuts import scales_of
from espalier.messages.records import STYPE, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings, require_sendable
from espalier.models.groups import Groups
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.storage.blobs import sha256
from tests.bench import Bench, summary
from tests.methods.pruning.llm_pruner.mask_tuning_runs import MaskTuningRuns


def changing(change: Callable[[dict[str, np.ndarray]], None], of_round: int) -> Any:
    """Return a tamper that changes the first blob of a round's reply and updates its hash."""

    def tamper(request: Message, reply: Message) -> Message:
        header = read(request.content).header
        if (header.kind, header.server_round) == ("train", of_round):
            key = min(reply.content["blobs"])
            tensors = {
                name: value.copy()
                for name, value in unpack_tensors(reply.content["blobs"][key].data).items()
            }
            change(tensors)
            blob = pack_tensors(tensors)
            reply.content["blobs"][key] = Array("", (), STYPE, blob)
            hashes = list(reply.content["fields"]["blob_sha256"])
            reply.content["fields"]["blob_sha256"] = [sha256(blob), *hashes[1:]]
        return reply

    return tamper


class TestMaskTuning(MaskTuningRuns):
    @pytest.mark.parametrize(
        ("of_round", "change", "words"),
        [
            (
                1,
                lambda own: own["channels.fisher"].__setitem__(0, 1e6),
                "its squares are more than the scores",
            ),
            (
                1,
                lambda own: own["channels.fisher"].__setitem__(0, np.nan),
                "a factor's number is not finite",
            ),
            (
                2,
                lambda own: own["aims"].__setitem__(0, np.inf),
                "not inner products of the outputs of groups",
            ),
            (
                2,
                lambda own: own["joint"].__setitem__(1, 1e6),
                "not inner products of the outputs of groups",
            ),
            (
                2,
                lambda own: own["joint"].__setitem__(0, -1),
                "not inner products of the outputs of groups",
            ),
            (2, lambda own: opposed(own["joint"]), "not inner products of the outputs of groups"),
        ],
    )
    def test_impossible_statistics_drop_their_sender(
        self,
        bench: Bench,
        of_round: int,
        change: Callable[[dict[str, np.ndarray]], None],
        words: str,
    ) -> None:
        """Inner products fail as a whole even if each pair of groups is valid."""
        grid = bench.grid()
        grid.tamper[1] = changing(change, of_round)
        clients = summary(bench.run(grid))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert words in clients[1]["reason"]

    def test_one_client_s_equations_are_capped(self, bench: Bench) -> None:
        def shout(tensors: dict[str, np.ndarray]) -> None:
            for value in tensors.values():
                value *= 1e6

        grid = bench.grid()
        grid.tamper[1] = changing(shout, 2)
        client = summary(
            bench.run(grid, federation__max_weight_ratio=2.0, federation__max_update_ratio=2.0)
        )["clients"][1]
        assert client["status"] == "completed"
        assert (
            client["capped"]["equations"]["claimed"]
            > 1000 * client["capped"]["equations"]["counted"]
        )


def opposed(triangle: np.ndarray) -> None:
    """Write inner products of three groups that are pairwise valid but impossible together.

    The others are 0.
    """
    width = round((np.sqrt(8 * len(triangle) + 1) - 1) / 2)
    full = np.zeros((width, width), np.float32)
    full[:3, :3] = 1.5 * np.eye(3) - 0.5 - 0.4 * (1 - np.eye(3))
    triangle[:] = full[np.triu_indices(width)]


def test_scales_beyond_ten_are_not_used() -> None:
    """A group that would need a scale of 20 keeps scale 1; a scale of 9 is valid."""
    job = LlmPrunerSettings.model_validate({"rescale": "all", "element": "squared"})
    assert scales_or_none((torch.tensor([[1.0]]), torch.tensor([20.0]))) is None
    found = scales_or_none((torch.tensor([[1.0]]), torch.tensor([9.0])))
    assert found is not None
    assert found.item() == pytest.approx((9 + 0.01) / 1.01)
    shapes = {
        "attn.q": (2, 2),
        "attn.k": (2, 2),
        "attn.o": (2, 2),
        "mlp.up": (3, 2),
        "mlp.down": (2, 3),
    }
    linears = tuple(LinearPlan(name, name, shape) for name, shape in shapes.items())
    groups = Groups.of(ModelPlan((BlockPlan(0, linears),), 0))
    cut = np.array([True, False, False, False, False])
    ((blob, scales),) = scaled_cuts(groups, cut, lambda *_: None, job)
    assert {kind: own.tolist() for kind, own in scales.items()} == {
        "groups": [0, 1],
        "channels": [1, 1, 1],
    }
    assert {kind: own.tolist() for kind, own in scales_of(unpack_tensors(blob)).items()} == {
        "groups": [0, 1],
        "channels": [1, 1, 1],
    }


def test_oversized_equations_are_refused() -> None:
    shapes = {
        "attn.q": (8, 8),
        "attn.k": (8, 8),
        "attn.v": (8, 8),
        "attn.o": (8, 8),
        "mlp.up": (30_000, 8),
        "mlp.down": (8, 30_000),
    }
    plan = ModelPlan(
        (BlockPlan(0, tuple(LinearPlan(name, name, shape) for name, shape in shapes.items())),), 0
    )
    require_sendable(plan, LlmPrunerSettings.model_validate({"rescale": "groups"}))
    with pytest.raises(
        EspalierError,
        match=r"rescale = 'all': the normal equations of 30000 channels .* 1800060000 bytes",
    ):
        require_sendable(plan, LlmPrunerSettings.model_validate({"rescale": "all"}))
