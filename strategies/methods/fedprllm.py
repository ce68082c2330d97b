"""FedPrLLM (papers: "Exploring Federated Pruning for Large Language Models").

Every client sends the mask by which it would prune the model. The server counts the votes for each weight (step 3) and
prunes the weights that most clients would prune, within each comparison group (step 4 and section 3.2.1). With weight
scaling it shrinks the others by the share of clients that would prune them (step 6); one-shot pruning decides all blocks
in one round, iterative pruning one block per round, and sends each decision back (step 7). Clients then go on behind the
masked block, as step 7 reads, or with ``continue-behind = "scaled"`` behind the scaled one, as the published code does. Ties,
which the paper leaves open and its code breaks at random without a seed, go to the smaller magnitude by default.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from espalier.wire.fedprllm import Decision, block_parts, blocks_of_round, decided_parts, votes_key
from espalier.wire.masks import mask_name
from espalier.wire.messages import Letter, NoScalars, Scalars
from espalier.wire.parts import PartRequest
from espalier.wire.payload import block_key
from pruning_kernels.votes import VoteCounter
from strategies.engine.counting import require_counting
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.method import Method
from strategies.engine.roster import Seat
from strategies.engine.run import Run
from strategies.methods.pattern_fit import require_pattern_fits
from strategies.results.votes import VoteResult


class FedPrLLM(Method):
    """Mask voting.

    Parameters
    ----------
    run : settings, dense model and run folder
    public_text : name -> windows (windows, tokens), int64, on which clients evaluate their own result; may be empty
    """

    def __init__(self, run: Run, public_text: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(run, ClientEvaluation(run, public_text or {}))
        self.settings = run.settings.fedprllm
        require_pattern_fits(run.model.plan, "fedprllm", self.settings)
        require_counting(run.device, run.settings.device)
        self.result = VoteResult(run.settings, run.model, run.checkpoint.blobs)
        self._reply_hashes: dict[int, list[str]] = {}

    @property
    def num_rounds(self) -> int:
        """One, or one per block."""
        return 1 if self.settings.strategy == "one-shot" else len(self.run.model.plan.blocks)

    def summary(self) -> None:
        """Show what will be done."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        text = f"{job.strategy}, {job.local_metric} by {job.local_group}, votes by {job.server_group}, ties by {job.ties}"
        scaling = ", weight scaling" if job.weight_scaling else ""
        self.run.progress.note("method", f"fedprllm     {amount}, {text}{scaling}")

    def state(self) -> dict[str, Any]:
        """What was decided."""
        return self.result.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.result.restore(state)

    def stored(self) -> Collection[str]:
        """Hashes of the result's blobs."""
        return self.result.stored()

    # ----- the round --------------------------------------------------------------------------------------------------

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask every client for its mask; in iterative pruning the decision on the block before is sent along (step 7)."""
        self.rounds.lost = {} if self.settings.strategy == "iterative" else None
        return self._orders(server_round, self.rounds.roster.active())

    def _orders(self, server_round: int, seats: Iterable[Seat]) -> list[Message]:
        decided: dict[str, bytes] = {}
        told: Scalars = NoScalars()
        if self.settings.strategy == "iterative" and server_round > 1:
            before = server_round - 2
            decided = {block_key(before): self.result.blob(before)}
            if self.settings.continue_behind == "scaled":
                decided[votes_key(before)] = self.result.votes_blob(before)
                told = Decision(num_voters=[self.result.num_voters[before]], decided=server_round - 1)
        return [self.rounds.request("train", seat, server_round, told, decided) for seat in seats]

    def _caught_up(self, server_round: int) -> Iterator[Message]:
        """Bring clients that lost their hidden states all that was decided, and ask again; they walk from the beginning."""
        lost = [seat for seat in self.rounds.roster.active() if seat.client in (self.rounds.lost or {})]
        for requests in self._deliveries(server_round, server_round - 1, lost):
            for _ in self.rounds.exchange(requests):
                pass
        active = self.rounds.roster.active()
        yield from self.rounds.exchange(self._orders(server_round, [seat for seat in lost if seat in active]), self.next_part)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Count the votes block by block and decide what is pruned (section 3.2, steps 3 and 4)."""
        self.run.progress.begin("masks", len(self.rounds.roster.active()))
        inbox = Inbox(self.run.folder.inbox)
        for letter in inbox.receive(chain(replies, self._caught_up(server_round))):
            self._note_arrival(letter)
        voters = inbox.complete_clients()
        self.rounds.require_quorum(len(voters), "sent their masks")
        blocks = blocks_of_round(self.run.model.plan, self.settings, server_round)
        self.run.progress.begin("voting", len(blocks))
        for index in blocks:
            block = self.run.model.plan.blocks[index]
            counters = {linear.name: VoteCounter(linear.shape, len(voters), self.run.device) for linear in block.linears}
            for name, counter in counters.items():
                for first, masks in inbox.words(block_key(index), mask_name(name)):
                    counter.count(masks, first)
            self.result.decide(block, counters)
            self.run.progress.step("voted", f"block {index}", block=index)
        inbox.clear()
        return None, MetricRecord({"num-clients": len(voters)})

    def _parts(self, server_round: int) -> list[range]:
        return block_parts(self.run.model.plan, self.settings, server_round, self.run.settings.part_bytes)

    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the part of a client's masks that follows the one which has arrived."""
        header = letter.header
        if header.kind == "train":
            self._reply_hashes[header.client] = letter.scalars["blob_sha256"]
        parts, following = self._parts(header.server_round), header.part + 1
        if following == len(parts):
            return None
        first = parts[0].start
        hashes = [self._reply_hashes[header.client][index - first] for index in parts[following]]
        seat = self.rounds.roster.seats[header.client]
        return self.rounds.request("fetch", seat, header.server_round, PartRequest(blob_sha256=hashes), part=following)

    def _note_arrival(self, letter: Letter) -> None:
        seat = self.rounds.roster.seats[letter.header.client]
        if letter.header.kind == "train":
            seat.worked(letter.scalars["seconds"])
        if letter.header.part + 1 == letter.header.num_parts:
            self.run.progress.step("masks", f"masks of {seat.site}, {seat.work()}", client=seat.client, seconds=seat.seconds)

    # ----- evaluation by the clients ----------------------------------------------------------------------------------

    def prepare(self, server_round: int) -> Iterable[list[Message]]:
        """Clients need nothing before a round; iterative pruning sends the decision along with it."""
        return []

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring the result to the clients, part by part, so that they can evaluate it on their own text."""
        if self.run.settings.evaluation.own_text:
            yield from self._deliveries(server_round, len(self.run.model.plan.blocks), self.rounds.roster.active())

    def _deliveries(self, server_round: int, decided: int, seats: Sequence[Seat]) -> Iterator[list[Message]]:
        """Requests that bring the first ``decided`` blocks, one part after the other, to clients that still take part."""
        scaled = self.settings.weight_scaling
        for part, blocks in enumerate(decided_parts(self.run.model.plan, self.run.settings, decided) if seats else []):
            blobs = {block_key(index): self.result.blob(index) for index in blocks}
            blobs |= {votes_key(index): self.result.votes_blob(index) for index in blocks if scaled}
            decision = Decision(num_voters=[self.result.num_voters[index] for index in blocks], decided=decided)
            active = self.rounds.roster.active()
            receiving = [seat for seat in seats if seat in active]
            yield [self.rounds.request("deliver", seat, server_round, decision, blobs, part) for seat in receiving]
