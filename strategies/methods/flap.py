"""FLAP, federated (An et al. 2024, "Fluctuation-based Adaptive Structured Pruning for Large Language Models").

Every client watches the inputs of each block's attention output and down in the dense model, and sends their mean and spread
per channel. The server pools them exactly, so that it decides what one party would that has all windows, but for rounding to
float32: which key-value groups and channels go, by the published metric, standardised within each block and compared over all
of them (section 3.3), and which biases take their place (section 3.4).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from flwr.app import Message

from espalier.modeling.opened import OpenedModel, check_labels
from espalier.modeling.structured.export import require_writable
from espalier.modeling.structured.flap import BlockMoments, flap_cuts
from espalier.settings.flap import FlapSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.flap import biases, mean_name, moment_specs, result_specs, squares_name
from espalier.wire.messages import NoScalars, Scalars
from espalier.wire.parts import parts_of
from espalier.wire.payload import block_key
from espalier.wire.structure import ADDED_BIASES
from pruning_kernels.fluctuation import Moments, pooled
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.method import Method
from strategies.engine.run import Run
from strategies.results.cuts import CutResult


class Flap(Method):
    """One round.

    Takes what ``Method`` does.
    """

    SENT = "moments"
    STEPS = ("moments", "moments")

    result: CutResult
    num_rounds = 1

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.settings = run.settings.of(FlapSettings)
        self.result = CutResult(run.model, run.checkpoint.blobs, biases(run.settings))

    @classmethod
    def require_fit(cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]) -> None:
        """Refuse a share that cannot be cut, and a form in which the smaller model cannot be written."""
        check_labels(model.family, None, str(model.directory / "config.json"))
        try:
            require_writable(model, settings.of(FlapSettings), biases(settings))
        except Mistake as mistake:
            raise Mistake(f"{settings.method}.{mistake}") from None

    def summary(self) -> None:
        """Show what will be done."""
        job = self.settings
        bias = ", with biases in their place" if job.bias_compensation else ""
        text = f"{job.share:.0%} of the {job.share_of}' parameters, {job.metric}, {job.selection} comparison{bias}"
        self.run.progress.note("method", f"flap         {text}")

    # ----- the round --------------------------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """Every client is asked for its moments."""
        return NoScalars(), {}

    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """Whole blocks' moments."""
        return parts_of(moment_specs(self.run.model.plan), self.run.settings.part_bytes)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Pool the moments and decide what is cut."""
        tokens = {client: int(self._reports[client]["tokens"]) for client in clients}

        @cache
        def moments(index: int) -> BlockMoments:
            return {
                name: pooled([_moments(inbox, client, index, name, tokens[client]) for client in clients]) for name in WATCHED
            }

        self.run.progress.begin("cutting", len(self.run.model.plan.blocks))
        for index, blob in enumerate(flap_cuts(self.run.model, moments, self.settings)):
            self.result.blobs.append(self.result.store.put(blob))
            self.run.progress.step("cut", f"block {index}", block=index)

    # ----- evaluation by the clients ----------------------------------------------------------------------------------

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring what is cut to the clients, part by part, so that they can evaluate it on their own text."""
        if self.run.settings.evaluation.own_text:
            places = {block_key(block.index): block.index for block in self.run.model.plan.blocks}
            specs = result_specs(self.run.model.plan, self.run.settings)
            for part, keys in enumerate(parts_of(specs, self.run.settings.part_bytes)):
                blobs = {key: self.result.blob(places[key]) for key in keys}
                seats = self.rounds.roster.active()
                yield [self.rounds.request("deliver", seat, server_round, NoScalars(), blobs, part) for seat in seats]


WATCHED = ADDED_BIASES
"""Matrices whose inputs are watched: those that get a bias."""


def _moments(inbox: Inbox, client: int, index: int, name: str, tokens: int) -> Moments:
    mean, squares = (inbox.tensor(client, block_key(index), of(name)).double() for of in (mean_name, squares_name))
    return Moments(tokens, mean, squares)
