"""FedPrLLM (paper: "Exploring Federated Pruning for Large Language Models").

Each client sends the mask with which it would prune the model. The server counts the votes for each
weight (step 3), and prunes the weights with most votes within each comparison group (step 4 and
section 3.2.1). With weight scaling, it multiplies each remaining weight by the fraction of clients
that voted to keep it (step 6). One-shot pruning decides all blocks in one round. Iterative pruning
decides one block per round and sends each decision back (step 7); clients continue behind the
masked block as in step 7, or behind the scaled one as in the published code (``continue-behind =
"scaled"``). By default, ties prune the weight with smaller magnitude: the paper does not define
ties, and its code breaks them at random without a seed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from espalier.hf.opening.opened import OpenedModel
from espalier.messages.blobs.masks import mask_name
from espalier.messages.message import Fields
from espalier.methods.fedprllm import (
    Decision,
    FedPrLLMSettings,
    blocks_of_round,
    decided_parts,
    votes_key,
)
from espalier.models.plan import block_key
from espalier.settings.run import RunSettings
from pruning_kernels.votes.votes import VoteCounter
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords
from strategies.base.run import Run
from strategies.base.vote_device import require_counting
from strategies.fedprllm.pattern_fit import require_pattern_fits
from strategies.fedprllm.votes import VoteResult


class FedPrLLM(Method):
    """Strategy of FedPrLLM: voting on prune masks.

    The parameters are those of ``Method``.
    """

    WORDS = ProgressWords("masks", "masks", "masks")
    result: VoteResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.settings = run.settings.of(FedPrLLMSettings)
        require_counting(run.device, run.settings.device)
        self.result = VoteResult(run.settings, run.model, run.checkpoint.blobs)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a pattern that does not fit the rows of a matrix."""
        require_pattern_fits(model.plan, settings)

    @property
    def num_rounds(self) -> int:
        """Number of rounds: 1 for one-shot pruning, one per block for iterative pruning."""
        return 1 if self.settings.strategy == "one-shot" else len(self.run.model.plan.blocks)

    def summary(self) -> None:
        """Show the method and its main settings."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        text = (
            f"{job.strategy}, {job.local_metric} by {job.local_group}, votes by {job.server_group},"
            f" ties by {job.ties}"
        )
        scaling = ", weight scaling" if job.weight_scaling else ""
        self.run.progress.note("method", f"fedprllm     {amount}, {text}{scaling}")

    # ----- round ----------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to send masks; parts have the masks of complete blocks.

        In iterative pruning it carries the decision on the block before (step 7).
        """
        order = super().order(server_round, client)
        if self.settings.strategy == "one-shot" or server_round == 1:
            return order
        before = server_round - 2
        decided = {block_key(before): self.result.blob(before)}
        if self.settings.continue_behind == "masked":
            return replace(order, blobs=decided)
        votes = {votes_key(before): self.result.votes_blob(before)}
        decision = Decision(num_voters=[self.result.num_voters[before]], decided=server_round - 1)
        return replace(order, fields=decision, blobs=decided | votes)

    def catch_up(self, server_round: int) -> Callable[[Sequence[int]], None] | None:
        """Return a function that pushes all decisions to clients that lost their hidden states.

        These clients start again at the first block.
        """
        if self.settings.strategy == "one-shot" or server_round == 1:
            return None
        return lambda lost: self._push(server_round, server_round - 1, lost)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Count the votes block by block, and decide the masks (section 3.2, steps 3 and 4)."""
        blocks = blocks_of_round(self.run.model.plan, self.settings, server_round)
        self.run.progress.begin("voting", len(blocks))
        for index in blocks:
            block = self.run.model.plan.blocks[index]
            counters = {
                linear.name: VoteCounter(linear.shape, len(clients), self.run.device)
                for linear in block.linears
            }
            for name, counter in counters.items():
                for first, masks in inbox.words(block_key(index), mask_name(name), clients):
                    counter.count(masks, first)
            self.result.decide(block, counters)
            self.run.progress.step("voted", f"block {index}", block=index)

    # ----- evaluation by the clients --------------------------------------------------------------

    def deliver(self, server_round: int) -> None:
        """Push the result to the clients, part by part, for the evaluation on their own text."""
        if self.run.settings.evaluation.own_text:
            self._push(server_round, len(self.run.model.plan.blocks))

    def _push(
        self, server_round: int, decided: int, clients: Collection[int] | None = None
    ) -> None:
        """Push the decisions on the first ``decided`` blocks to clients; None means all."""
        self.rounds.push_parts(server_round, self._decided(decided), clients)

    def _decided(self, decided: int) -> Iterator[tuple[Fields, Mapping[str, bytes]]]:
        """Yield the decisions on the first ``decided`` blocks, part by part."""
        scaled = self.settings.weight_scaling
        for blocks in decided_parts(self.run.model.plan, self.run.settings, decided):
            blobs = {block_key(index): self.result.blob(index) for index in blocks}
            blobs |= {votes_key(index): self.result.votes_blob(index) for index in blocks if scaled}
            yield (
                Decision(
                    num_voters=[self.result.num_voters[index] for index in blocks], decided=decided
                ),
                blobs,
            )
