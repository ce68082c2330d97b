"""FedPrLLM (papers: "Exploring Federated Pruning for Large Language Models").

Every client sends the mask by which it would prune the model. The server counts the votes for each weight (step 3) and
prunes the weights that most clients would prune, within each comparison group (step 4 and section 3.2.1). With weight
scaling it shrinks the others by the share of clients that would prune them (step 6); one-shot pruning decides all blocks
in one round, iterative pruning one block per round, and sends each decision back (step 7). Ties, which the paper leaves
open and its code breaks at random without a seed, go to the smaller magnitude by default.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from espalier.modeling.edits import WeightEdit, masked, masked_and_scaled
from espalier.settings.mistakes import Mistake
from espalier.settings.seeds import derive_seed
from espalier.wire.evaluation import WINDOWS_BLOB, PublicText
from espalier.wire.fedprllm import block_parts, blocks_of_round
from espalier.wire.masks import mask_name, pack_masks, unpack_masks
from espalier.wire.messages import Letter, NoScalars, read
from espalier.wire.parts import PartRequest
from espalier.wire.payload import block_key, pack_tensors, unpack_tensors
from espalier.wire.plan import BlockPlan, LinearPlan
from pruning_kernels.selection import group_size, pruned_in_matrix
from pruning_kernels.votes import VoteCounter, select_most_voted
from strategies.inbox import Inbox
from strategies.rounds import Rounds
from strategies.run import Run, live

STATE = ("mask_blobs", "count_blobs", "num_voters", "unanimous_survivors")
"""Attributes that a checkpoint keeps."""


class FedPrLLM(Strategy):
    """Mask voting.

    Parameters
    ----------
    run : settings, dense model and run folder
    public_text : name -> windows (windows, tokens), int64, on which clients evaluate their own result; None: they do not
    """

    rounds: Rounds

    def __init__(self, run: Run, public_text: dict[str, torch.Tensor] | None = None) -> None:
        self.run = run
        self.settings = run.settings.fedprllm
        self.public_text = public_text
        self._require_pattern_fits()
        self.num_rounds = 1 if self.settings.strategy == "one-shot" else len(run.model.plan.blocks)
        self.mask_blobs: list[str] = []
        """Hash of each decided block's masks in the checkpoint's blobs."""
        self.count_blobs: list[str] = []
        """Hash of each decided block's vote counts there; with weight scaling only."""
        self.num_voters: list[int] = []
        """How many clients voted on each decided block."""
        self.unanimous_survivors = 0
        """Weights that are kept although every client would prune them (column comparison has many)."""
        self._reply_hashes: dict[int, list[str]] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 1,
        timeout: float = 0.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run on a grid; of Flower's arguments only ``grid`` is used, the others are part of the run's settings."""
        return live(self, grid, self.num_rounds)

    def summary(self) -> None:
        """Show what will be done."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        text = f"{job.strategy}, {job.local_metric} by {job.local_group}, votes by {job.server_group}, ties by {job.ties}"
        scaling = ", weight scaling" if job.weight_scaling else ""
        self.run.progress.note("method", f"fedprllm     {amount}, {text}{scaling}")

    def state(self) -> dict[str, Any]:
        """What was decided, by hash, and what is reported of it."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        for name in STATE:
            setattr(self, name, state[name])

    def local_sparsity(self) -> float:
        """Share of the prunable weights that one client alone masks, as its settings demand it."""
        shapes = [linear.shape for block in self.run.model.plan.blocks for linear in block.linears]
        pruned = sum(pruned_in_matrix(shape, self.settings.sparsity, self.settings.local_group) for shape in shapes)
        return pruned / self.run.model.plan.num_weights

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""
        return {"unanimous_survivors": self.unanimous_survivors}

    def zeros_beyond_masks(self) -> int:
        """Kept weights that weight scaling turns into zeros, since all clients would prune them."""
        return self.unanimous_survivors if self.settings.weight_scaling else 0

    def prune_masks(self, index: int) -> dict[str, torch.Tensor]:
        """The decided prune masks of one block: bool, by canonical linear name."""
        return unpack_masks(self.run.model.plan.blocks[index], self.run.checkpoint.blobs.get(self.mask_blobs[index]))

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """What the method does to one block's dense weights (steps 5 and 6)."""
        if self.settings.weight_scaling:
            return masked_and_scaled(self.prune_masks, self.kept_shares)(index)
        return masked(self.prune_masks)(index)

    def kept_shares(self, index: int) -> dict[str, torch.Tensor]:
        """``(m - votes) / m`` for the weights of one block, float32, by canonical linear name."""
        counts = unpack_tensors(self.run.checkpoint.blobs.get(self.count_blobs[index]))
        voters = self.num_voters[index]
        return {name: (voters - torch.from_numpy(count.astype(np.float32))) / voters for name, count in counts.items()}

    # ----- the round --------------------------------------------------------------------------------------------------

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask every client for its mask; in iterative pruning the decision on the block before is sent along (step 7)."""
        decided = {}
        if self.settings.strategy == "iterative" and server_round > 1:
            before = server_round - 2
            decided = {block_key(before): self.run.checkpoint.blobs.get(self.mask_blobs[before])}
        seats = self.rounds.roster.active()
        return [self.rounds.request("train", seat, server_round, NoScalars(), decided) for seat in seats]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Count the votes block by block and decide what is pruned (section 3.2, steps 3 and 4)."""
        self.run.progress.begin("masks", len(self.rounds.roster.active()))
        inbox = Inbox(self.run.folder.inbox)
        for letter in inbox.receive(replies):
            self._note_arrival(letter)
        voters = inbox.complete_ranks()
        self.rounds.require_quorum(len(voters), "sent their masks")
        blocks = blocks_of_round(self.run.model.plan, self.settings, server_round)
        self.run.progress.begin("voting", len(blocks))
        for index in blocks:
            block = self.run.model.plan.blocks[index]
            counters = {linear.name: VoteCounter(linear.num_weights) for linear in block.linears}
            for _, blob in inbox.blobs(block_key(index)):
                votes = unpack_tensors(blob)
                for name, counter in counters.items():
                    counter.add(votes[mask_name(name)])
            self._decide(block, {name: counter.counts() for name, counter in counters.items()}, len(voters))
            self.run.progress.step("voted", f"block {index}", block=index)
        inbox.clear()
        return None, MetricRecord({"num-clients": len(voters)})

    def _decide(self, block: BlockPlan, votes: dict[str, NDArray[np.int32]], voters: int) -> None:
        """Decide the prune masks of one block, and keep them and what else the result needs in the checkpoint."""
        prune_masks, counts = {}, {}
        for linear in block.linears:
            count = votes[linear.name].reshape(linear.shape)
            job = self.settings
            prune_mask = select_most_voted(count, job.sparsity, job.server_group, self._tie_key(block, linear))
            self.unanimous_survivors += int(np.count_nonzero((count == voters) & ~prune_mask))
            prune_masks[linear.name] = torch.from_numpy(prune_mask)
            counts[linear.name] = count.astype(np.min_scalar_type(voters))
        store = self.run.checkpoint.blobs
        self.mask_blobs.append(store.put(pack_masks(prune_masks)))
        self.num_voters.append(voters)
        if self.settings.weight_scaling:
            self.count_blobs.append(store.put(pack_tensors(counts)))

    def _tie_key(self, block: BlockPlan, linear: LinearPlan) -> NDArray[np.floating] | None:
        """Among equally voted weights the smaller key goes first; None: the lower index."""
        if self.settings.ties == "magnitude":
            return self.run.model.checkpoint.read(linear.parameter).to(torch.float32).abs().numpy()
        if self.settings.ties == "random":
            seed = derive_seed(self.run.settings.seed, f"ties/{linear.name}", block=block.index)
            return np.random.default_rng(seed).random(linear.shape)
        return None

    def _require_pattern_fits(self) -> None:
        """Refuse an n:m pattern that does not divide the rows of a matrix, before anything is sent."""
        for block in self.run.model.plan.blocks:
            for linear in block.linears:
                try:
                    group_size(linear.shape, self.settings.server_group)
                except ValueError as error:
                    raise Mistake(f"fedprllm.pattern = '{self.settings.pattern}': {linear.parameter}: {error}") from None

    def _parts(self, server_round: int) -> list[range]:
        return block_parts(self.run.model.plan, self.settings, server_round, self.run.settings.part_bytes)

    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the part of a client's masks that follows the one which has arrived."""
        header = letter.header
        if header.kind == "train":
            self._reply_hashes[header.rank] = letter.scalars["blob_sha256"]
        parts, following = self._parts(header.server_round), header.part + 1
        if following == len(parts):
            return None
        first = parts[0].start
        hashes = [self._reply_hashes[header.rank][index - first] for index in parts[following]]
        seat = self.rounds.roster.seats[header.rank]
        return self.rounds.request("fetch", seat, header.server_round, PartRequest(blob_sha256=hashes), part=following)

    def _note_arrival(self, letter: Letter) -> None:
        seat = self.rounds.roster.seats[letter.header.rank]
        if letter.header.kind == "train":
            seat.seconds += letter.scalars["seconds"]
            seat.metrics = {name: letter.scalars[name] for name in ("calibration_tokens", "calibration_sha256")}
        if letter.header.part + 1 == letter.header.num_parts:
            self.run.progress.step("masks", f"masks of {seat.site}, {seat.seconds:.1f} s of work", rank=seat.rank)

    # ----- evaluation by the clients ----------------------------------------------------------------------------------

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask every client how well its own pruned model predicts public text, which is sent along."""
        if self.public_text is None:
            return []
        names = list(self.public_text)
        text = PublicText(
            names=names,
            num_windows=[len(self.public_text[name]) for name in names],
            window_tokens=self.public_text[names[0]].shape[1],
        )
        blob = pack_tensors({name: windows.numpy().astype(np.int32) for name, windows in self.public_text.items()})
        return [
            self.rounds.request("evaluate", seat, server_round, text, {WINDOWS_BLOB: blob})
            for seat in self.rounds.roster.active()
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Mean over clients of the loss of their own result, per text."""
        self.run.progress.begin("local only", len(self.rounds.roster.active()) if self.public_text else 0)
        losses: dict[int, list[float]] = {}
        for reply in replies:
            letter = read(reply.content)
            seat = self.rounds.roster.seats[letter.header.rank]
            seat.seconds += letter.scalars["seconds"]
            losses[seat.rank] = list(letter.scalars["losses"])
            self.run.progress.step("local_only", f"local result of {seat.site}", rank=seat.rank)
        return MetricRecord({f"loss/{rank}": values for rank, values in sorted(losses.items())})
