"""Base class of methods that remove prunable groups: their result, and its way to the clients."""

from collections.abc import Iterator, Mapping

from flwr.app import Message

from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened import OpenedModel, check_labels
from espalier.hf.structured.export import require_writable
from espalier.messages.blobs.cuts import cut_specs
from espalier.messages.message import NoScalars
from espalier.messages.parts import parts_of
from espalier.models.plan import ModelPlan, block_key
from espalier.settings.run import RunSettings
from espalier.settings.structured import StructuredSettings
from strategies.base.evaluation import ClientEvaluation
from strategies.base.method import Method
from strategies.base.run import Run
from strategies.structured.cuts import CutResult


class Cutting(Method):
    """Structured pruning in one round, decided in ``fold``; a subclass may have more rounds.

    The parameters are those of ``Method``.
    """

    result: CutResult

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.result = CutResult(run.model, run.checkpoint.blobs, self.biases(run.settings))

    @classmethod
    def biases(cls, settings: RunSettings) -> tuple[str, ...]:
        """Return the canonical names of the matrices that get a bias."""
        return ()

    @classmethod
    def scaled(cls, settings: RunSettings) -> tuple[str, ...]:
        """Return the kinds of prunable groups that get scales."""
        return ()

    @classmethod
    def blocks(cls, settings: RunSettings, plan: ModelPlan) -> range:
        """Return the blocks whose groups may be removed.

        Raises
        ------
        InputError
            No block remains. The message begins with the key in the method's table.
        """
        return range(len(plan.blocks))

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse an encoder, an impossible pruning ratio, or a model that cannot be written.

        Some forms of output cannot hold a model whose blocks differ in shape.
        """
        check_labels(model.family, None, str(model.directory / "config.json"))
        try:
            blocks = cls.blocks(settings, model.plan)
            require_writable(model, settings.of(StructuredSettings), cls.biases(settings), blocks)
        except EspalierError as error:
            raise InputError(f"{settings.method}.{error}") from None

    def keep(self, blobs: Iterator[bytes]) -> None:
        """Store the decision of each block."""
        self.run.progress.begin("cutting", len(self.run.model.plan.blocks))
        for index, blob in enumerate(blobs):
            self.result.blobs.append(self.result.store.put(blob))
            self.run.progress.step("cut", f"block {index}", block=index)

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Push the decisions to the clients, part by part, for the evaluation on their own text."""
        if not self.run.settings.evaluation.own_text:
            return
        places = {block_key(block.index): block.index for block in self.run.model.plan.blocks}
        specs = cut_specs(self.run.model.plan, self.result.biases, self.scaled(self.run.settings))
        parts = parts_of(specs, self.run.settings.part_bytes)
        whole = (
            (NoScalars(), {key: self.result.blob(places[key]) for key in keys}) for keys in parts
        )
        yield from self.bring(server_round, whole)
