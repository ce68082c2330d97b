"""FedPrLLM (papers: "Exploring Federated Pruning for Large Language Models").

Every client sends the mask by which it would prune the model. The server counts the votes for each weight (step 3) and
prunes the weights that most clients would prune, within each comparison group (step 4 and section 3.2.1). With weight
scaling it shrinks the others by the share of clients that would prune them (step 6); one-shot pruning decides all blocks
in one round, iterative pruning one block per round, and sends each decision back (step 7). Clients then go on behind the
masked block, as step 7 reads, or with ``continue-behind = "scaled"`` behind the scaled one, as the published code does. Ties,
which the paper leaves open and its code breaks at random without a seed, go to the smaller magnitude by default.
"""

from collections.abc import Iterator, Mapping, Sequence

from flwr.app import Message

from espalier.modeling.opened import OpenedModel
from espalier.settings.fedprllm import FedPrLLMSettings
from espalier.settings.run import RunSettings
from espalier.wire.fedprllm import Decision, blocks_of_round, decided_parts, mask_blobs, votes_key
from espalier.wire.masks import mask_name
from espalier.wire.messages import NoScalars, Scalars
from espalier.wire.parts import parts_of
from espalier.wire.payload import block_key
from pruning_kernels.votes import VoteCounter
from strategies.engine.counting import require_counting
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.method import Method
from strategies.engine.run import Run
from strategies.methods.pattern_fit import require_pattern_fits
from strategies.results.votes import VoteResult


class FedPrLLM(Method):
    """Mask voting.

    Takes what ``Method`` does.
    """

    SENT = "masks"
    STEPS = ("masks", "masks")

    result: VoteResult

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.settings = run.settings.of(FedPrLLMSettings)
        require_counting(run.device, run.settings.device)
        self.result = VoteResult(run.settings, run.model, run.checkpoint.blobs)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a pattern that does not divide the rows of a matrix."""
        require_pattern_fits(model.plan, settings)

    @property
    def num_rounds(self) -> int:
        """One, or one per block."""
        return 1 if self.settings.strategy == "one-shot" else len(self.run.model.plan.blocks)

    def summary(self) -> None:
        """Show what will be done."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        text = (
            f"{job.strategy}, {job.local_metric} by {job.local_group}, votes by {job.server_group},"
            f" ties by {job.ties}"
        )
        scaling = ", weight scaling" if job.weight_scaling else ""
        self.run.progress.note("method", f"fedprllm     {amount}, {text}{scaling}")

    # ----- the round --------------------------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """Every client is asked for its mask; in iterative pruning the decision on the block before comes along (step 7)."""
        if self.settings.strategy == "one-shot" or server_round == 1:
            return NoScalars(), {}
        before = server_round - 2
        decided = {block_key(before): self.result.blob(before)}
        if self.settings.continue_behind == "masked":
            return NoScalars(), decided
        votes = {votes_key(before): self.result.votes_blob(before)}
        return (
            Decision(num_voters=[self.result.num_voters[before]], decided=server_round - 1),
            decided | votes,
        )

    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """Whole blocks' masks."""
        return parts_of(
            mask_blobs(self.run.model.plan, self.settings, server_round),
            self.run.settings.part_bytes,
        )

    def catches_up(self, server_round: int) -> bool:
        """Whether a client goes on from the hidden states of an earlier round."""
        return self.settings.strategy == "iterative" and server_round > 1

    def bring_again(self, server_round: int, lost: Sequence[int]) -> Iterator[list[Message]]:
        """All that was decided, to clients that lost their hidden states: they walk from the beginning."""
        return self.bring(server_round, self._decided(server_round - 1 if lost else 0), lost)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Count the votes block by block and decide what is pruned (section 3.2, steps 3 and 4)."""
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

    # ----- evaluation by the clients ----------------------------------------------------------------------------------

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring the result to the clients, part by part, so that they can evaluate it on their own text."""
        if self.run.settings.evaluation.own_text:
            yield from self.bring(server_round, self._decided(len(self.run.model.plan.blocks)))

    def _decided(self, decided: int) -> Iterator[tuple[Scalars, Mapping[str, bytes]]]:
        """The first ``decided`` blocks, part by part."""
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
