"""Federated FLAP (An et al. 2024).

Paper: "Fluctuation-based Adaptive Structured Pruning for Large Language Models".
Every client observes the inputs of each block's attention output and FFN down projection in the
dense model, and sends their sum and sum of squares per channel in fixed point. The server adds them
exactly, in any order. Up to rounding, it decides as a centralized run with all calibration samples
would. It removes key-value groups and channels by the published metric, standardized within each
block and compared over all blocks (section 3.3). Biases compensate for them (section 3.4).
"""

from collections.abc import Callable, Mapping
from functools import cache

from espalier.hf.group_scores.flap import BlockMoments, flap_cuts, moments_of_sums
from espalier.hf.opening.opened_model import OpenedModel
from espalier.methods.pruning.flap import FlapSettings, biases
from espalier.methods.pruning.pooled_pruning import COUNT
from espalier.models.plan import ModelPlan, block_key
from espalier.models.structure import ADDED_BIASES
from espalier.settings.run import RunSettings
from pruning_kernels.fixed_point import Words, summed
from pruning_kernels.groups.fluctuation import Moments, limited_by_median, pooled, trimmed
from pruning_kernels.lora.clipping import SINGLE_NUMBERS
from pruning_kernels.wide_integers import from_wide
from strategies.averaging.client_weights import count_claims, count_sizes
from strategies.averaging.updates import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import Method, ProgressWords
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums
from strategies.cuts import CutResult, require_cuttable


class Flap(Method):
    """Strategy of FLAP: pooled fluctuation of the inputs."""

    WORDS = ProgressWords("moments", "moments", "moments")
    result: CutResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(FlapSettings)
        self.result = CutResult(run, biases(run.settings))

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

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return that a client's blocks cover different numbers of tokens."""
        counts = {_tokens(inbox, client, block.index) for block in self.run.model.plan.blocks}
        return None if len(counts) == 1 else f"{COUNT}: its blocks have different numbers of tokens"

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Add the sums and decide the cut."""
        replies = Replies(inbox, self.run.model.plan, clients)
        # 1. Limit the number of tokens that each client counts for, and the scale of its inputs.
        claimed = {client: float(tokens) for client, tokens in replies.tokens.items()}
        tokens = count_claims(self.rounds, "tokens", claimed)
        factor = count_sizes(self.rounds, "inputs", replies.sizes())
        # If no limit applies, the exact fixed-point sums are used, and the result is that of one
        # party.
        as_claimed = tokens == claimed and set(factor.values()) == {1.0}
        federation = self.run.settings.federation
        limits = UpdateLimits(federation.update_limit)
        trim = federation.trim(len(clients))

        # A block is asked for several times, for scores and for biases.
        @cache
        def moments(index: int) -> BlockMoments:
            block_moments = replies.pooled(index)
            # Neither a rule nor a limit is in force.
            if as_claimed and limits.off and not trim:
                return block_moments
            client_moments = {client: replies.of(client, index) for client in clients}
            # 2. Limit or trim the moments of each channel.
            for name in ADDED_BIASES:
                counted = [
                    client_moments[client][name].counted(int(tokens[client]), factor[client])
                    for client in clients
                ]
                if trim:
                    block_moments[name] = trimmed(counted, trim)
                    continue
                parts, excesses = limited_by_median(counted, SINGLE_NUMBERS * limits.max_ratio)
                for client, excess in zip(clients, excesses, strict=True):
                    if excess > 1:
                        limits.note(client, (index, name), excess, 1.0)
                # If no limit has an effect, the moments are those of the exact sums.
                if not as_claimed or max(excesses) > 1:
                    block_moments[name] = pooled(parts)
            return block_moments

        # 3. Decide once for all blocks; this asks for every block's moments.
        self._cut(moments)
        limits.tell(self.rounds, "moments")

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Decide the cut by the sums of all clients."""

        @cache
        def moments(index: int) -> BlockMoments:
            key = block_key(index)
            # One count for the block: all matrices saw the same tokens.
            tokens = int(sums.tensor(key, COUNT)[0])
            return moments_of_sums(tokens, lambda name: from_wide(sums.tensor(key, name)))

        self._cut(moments)

    def _cut(self, moments: Callable[[int], BlockMoments]) -> None:
        """Decide the cut by the moments of each block."""
        self.result.keep(flap_cuts(self.run.model, moments, self.job))

    def push_result(self, server_round: int) -> None:
        """Push the decisions to the clients, for the evaluation on their own text."""
        self.result.push(server_round)


class Replies:
    """Sums of a round's clients."""

    def __init__(self, inbox: Inbox, plan: ModelPlan, clients: list[int]) -> None:
        self._inbox = inbox
        self._plan = plan
        self.tokens = {client: _tokens(inbox, client, 0) for client in clients}
        """Number of tokens of each client."""

    def _words(self, client: int, index: int, name: str) -> Words:
        tensor = self._inbox.tensor(client, block_key(index), name)
        words: Words = tensor.numpy()
        return words

    def of(self, client: int, index: int) -> dict[str, Moments]:
        """Return a client's moments of a block."""
        return moments_of_sums(self.tokens[client], lambda name: self._words(client, index, name))

    def pooled(self, index: int) -> dict[str, Moments]:
        """Return the moments of all clients' inputs of a block."""
        return moments_of_sums(
            sum(self.tokens.values()),
            # Words are added as integers, so the order of clients has no effect.
            lambda name: summed([self._words(client, index, name) for client in self.tokens]),
        )

    def sizes(self) -> dict[int, float]:
        """Return the root mean square of each client's inputs, summed over matrices."""
        return {
            client: sum(
                float((moments.square_sum / moments.count).mean().sqrt())
                for block in self._plan.blocks
                for moments in self.of(client, block.index).values()
            )
            for client in self.tokens
        }


def _tokens(inbox: Inbox, client: int, index: int) -> int:
    """Return the number of tokens that a client reports with a block."""
    return int(inbox.tensor(client, block_key(index), COUNT))
