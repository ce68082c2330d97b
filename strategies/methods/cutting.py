"""What methods share that decide which units of a model go: their result, and how clients get it."""

from collections.abc import Iterator, Mapping

from flwr.app import Message

from espalier.modeling.opened import OpenedModel, check_labels
from espalier.modeling.structured.export import require_writable
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.settings.structured import StructuredSettings
from espalier.wire.cuts import cut_specs
from espalier.wire.messages import NoScalars, Scalars
from espalier.wire.parts import parts_of
from espalier.wire.payload import block_key
from espalier.wire.plan import ModelPlan
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.method import Method
from strategies.engine.run import Run
from strategies.results.cuts import CutResult


class Cutting(Method):
    """One round, unless a subclass has more; it decides in ``fold``.

    Takes what ``Method`` does.
    """

    result: CutResult
    num_rounds = 1

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.result = CutResult(run.model, run.checkpoint.blobs, self.biases(run.settings))

    @classmethod
    def biases(cls, settings: RunSettings) -> tuple[str, ...]:
        """Canonical names of the matrices that get a bias."""
        return ()

    @classmethod
    def scaled(cls, settings: RunSettings) -> tuple[str, ...]:
        """Kinds of units that get scales."""
        return ()

    @classmethod
    def blocks(cls, settings: RunSettings, plan: ModelPlan) -> range:
        """Blocks of which units may be cut; ``Mistake`` where there is none, beginning with the key of the method's table."""
        return range(len(plan.blocks))

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse an encoder, a share that cannot be cut, and a form in which the smaller model could not be written."""
        check_labels(model.family, None, str(model.directory / "config.json"))
        try:
            blocks = cls.blocks(settings, model.plan)
            require_writable(model, settings.of(StructuredSettings), cls.biases(settings), blocks)
        except Mistake as mistake:
            raise Mistake(f"{settings.method}.{mistake}") from None

    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """Every client is asked for what it finds in the dense model."""
        return NoScalars(), {}

    def keep(self, blobs: Iterator[bytes]) -> None:
        """Keep what is cut, block after block."""
        self.run.progress.begin("cutting", len(self.run.model.plan.blocks))
        for index, blob in enumerate(blobs):
            self.result.blobs.append(self.result.store.put(blob))
            self.run.progress.step("cut", f"block {index}", block=index)

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring what is cut to the clients, part by part, so that they can evaluate it on their own text."""
        if not self.run.settings.evaluation.own_text:
            return
        places = {block_key(block.index): block.index for block in self.run.model.plan.blocks}
        specs = cut_specs(self.run.model.plan, self.result.biases, self.scaled(self.run.settings))
        parts = parts_of(specs, self.run.settings.part_bytes)
        whole = (
            (NoScalars(), {key: self.result.blob(places[key]) for key in keys}) for keys in parts
        )
        yield from self.bring(server_round, whole)
