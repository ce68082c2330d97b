"""Federated FLAP (An et al. 2024).

Paper: "Fluctuation-based Adaptive Structured Pruning for Large Language Models".
Every client observes the inputs of each block's attention output and FFN down projection in the
dense model, and sends their mean and sum of squared deviations per channel. The server pools them
exactly. Up to float32 rounding, it decides as one party with all calibration samples would. It
removes key-value groups and channels by the published metric, standardized within each block and
compared over all blocks (section 3.3). Biases compensate for them (section 3.4).
"""

from collections.abc import Mapping
from functools import cache

from espalier.hf.group_scores.flap import BlockMoments, flap_cuts
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.message import MessageBody
from espalier.methods.flap import FlapSettings, biases, mean_name, squares_name
from espalier.models.plan import block_key
from espalier.models.structure import ADDED_BIASES
from espalier.settings.run import RunSettings
from pruning_kernels.groups.fluctuation import Moments, limited_by_median, pooled, trimmed
from pruning_kernels.lora.clipping import SINGLE_NUMBERS
from strategies.averaging.client_weights import count_claims, count_sizes
from strategies.averaging.updates import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import Method, ProgressWords
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.cuts import CutResult, require_cuttable


class Flap(Method):
    """Strategy of FLAP: pooled fluctuation of the inputs."""

    WORDS = ProgressWords("moments", "moments", "moments")
    result: CutResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(FlapSettings)
        self.result = CutResult(run, biases(run.settings))
        self._tokens: dict[int, int] = {}
        """Number of tokens that each client reported."""

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a model that cannot be cut by these settings."""
        require_cuttable(settings, model, range(len(model.plan.blocks)), biases(settings))

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.job
        bias = ", with biases in their place" if job.bias_compensation else ""
        amount = f"{job.pruning_ratio:.0%} of the blocks' parameters"
        rule = self.run.settings.federation.rule_in_words
        return f"{amount}, {job.selection} comparison{bias}{rule}"

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record the number of tokens."""
        if body.header.kind == "train":
            self._tokens[seat.client] = int(body.fields["tokens"])

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Pool the moments and decide the cut."""
        claimed = {client: self._tokens[client] for client in clients}
        sizes = {client: self._size(inbox, client, claimed[client]) for client in clients}
        as_floats = {client: float(number) for client, number in claimed.items()}
        tokens = count_claims(self.rounds, "tokens", as_floats)
        factor = count_sizes(self.rounds, "inputs", sizes)
        federation = self.run.settings.federation
        limits = UpdateLimits(federation.max_update_ratio)

        @cache
        def moments(index: int) -> BlockMoments:
            found = {}
            for name in ADDED_BIASES:
                own = [
                    _moments(inbox, client, index, name, claimed[client]).counted(
                        int(tokens[client]), factor[client]
                    )
                    for client in clients
                ]
                if federation.clips:
                    own, excesses = limited_by_median(own, SINGLE_NUMBERS * limits.max_ratio)
                    for client, excess in zip(clients, excesses, strict=True):
                        if excess > 1:
                            limits.note(client, (index, name), excess, 1.0)
                trim = federation.trim(len(clients))
                found[name] = trimmed(own, trim) if trim else pooled(own)
            return found

        self.result.keep(flap_cuts(self.run.model, moments, self.job))
        limits.tell(self.rounds, "moments")

    def deliver(self, server_round: int) -> None:
        """Push the decisions to the clients, for the evaluation on their own text."""
        self.result.push(server_round)

    def _size(self, inbox: Inbox, client: int, tokens: int) -> float:
        """Return the root mean square of a client's inputs, summed over matrices."""
        found = (
            _moments(inbox, client, block.index, name, tokens)
            for block in self.run.model.plan.blocks
            for name in ADDED_BIASES
        )
        return sum(float((one.square_sum / one.count).mean().sqrt()) for one in found)


def _moments(inbox: Inbox, client: int, index: int, name: str, tokens: int) -> Moments:
    mean = inbox.tensor(client, block_key(index), mean_name(name)).double()
    squares = inbox.tensor(client, block_key(index), squares_name(name)).double()
    return Moments(tokens, mean, squares)
