"""FedSpaLLM keeps the promises of every method, and its own."""

from typing import Any, ClassVar

from promises import Promises

from espalier.modeling.opened import OpenedModel


def exact(model: OpenedModel, sparsity: float) -> float:
    """Achieved share when every matrix loses ``int(weights * sparsity)``."""
    shapes = [linear.shape for block in model.plan.blocks for linear in block.linears]
    return sum(int(rows * columns * sparsity) for rows, columns in shapes) / sum(rows * columns for rows, columns in shapes)


class TestFedSpaLLM(Promises):
    """Two rounds of a rising schedule; every client prunes every layer."""

    method = "fedspallm"
    settings: ClassVar[dict[str, Any]] = {"fedspallm.rounds": 2, "fedspallm.schedule": "linear", "fedspallm.sparsity": 0.5}
    last_round = 1

    def expected_sparsity(self, model: OpenedModel) -> float:
        return exact(model, 0.5)
