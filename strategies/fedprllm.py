"""FedPrLLM (papers: "Exploring Federated Pruning for Large Language Models"), one-shot.

Every client sends the mask by which it would prune the model. The server counts the votes for each weight (step 3),
prunes the weights that most clients would prune, within each comparison group (step 4 and section 3.2.1), and leaves the
others as they are (no weight scaling). Ties, which the paper leaves open and its code breaks at random without a seed,
go to the smaller magnitude by default.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from espalier.modeling.edits import WeightEdit, masked
from espalier.wire.evaluation import WINDOWS_BLOB, PublicText
from espalier.wire.fedprllm import block_parts
from espalier.wire.masks import mask_name, pack_masks, unpack_masks
from espalier.wire.messages import Letter, NoScalars, read
from espalier.wire.parts import PartRequest
from espalier.wire.payload import block_key, pack_tensors, unpack_tensors
from espalier.wire.plan import BlockPlan
from pruning_kernels.votes import VoteCounter, select_most_voted
from strategies.inbox import Inbox
from strategies.rounds import Rounds
from strategies.run import Run, live


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
        self.parts = block_parts(run.model.plan, run.settings.part_bytes)
        self.mask_blobs: list[str] = []
        """Hash of each block's decided masks in the checkpoint's blobs; empty until the round is finished."""
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
        return live(self, grid, num_rounds=1)

    def summary(self) -> None:
        """Show what will be done."""
        job = self.settings
        text = f"{job.local_metric} by {job.local_comparison_group}, votes by {job.comparison_group}"
        self.run.progress.note("method", f"fedprllm     {job.sparsity:.0%} sparsity, {text}, ties by {job.ties}")

    def state(self) -> dict[str, Any]:
        """The decided masks, by hash."""
        return {"mask_blobs": self.mask_blobs}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the decided masks."""
        self.mask_blobs = state["mask_blobs"]

    def prune_masks(self, index: int) -> dict[str, torch.Tensor]:
        """The decided prune masks of one block: bool, by canonical linear name."""
        return unpack_masks(self.run.model.plan.blocks[index], self.run.checkpoint.blobs.get(self.mask_blobs[index]))

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """What the method does to one block's dense weights."""
        return masked(self.prune_masks)(index)

    # ----- the round --------------------------------------------------------------------------------------------------

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask every client for its mask."""
        return [self.rounds.request("train", seat, server_round, NoScalars()) for seat in self.rounds.roster.active()]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Count the votes block by block and decide what is pruned (section 3.2, steps 3 and 4)."""
        self.run.progress.begin("masks", len(self.rounds.roster.active()))
        inbox = Inbox(self.run.folder.inbox)
        for letter in inbox.receive(replies):
            self._note_arrival(letter)
        voters = inbox.complete_ranks()
        self.rounds.require_quorum(len(voters), "sent their masks")
        self.run.progress.begin("voting", len(self.run.model.plan.blocks))
        for block in self.run.model.plan.blocks:
            counters = {linear.name: VoteCounter(linear.num_weights) for linear in block.linears}
            for _, blob in inbox.blobs(block_key(block.index)):
                votes = unpack_tensors(blob)
                for name, counter in counters.items():
                    counter.add(votes[mask_name(name)])
            self.mask_blobs.append(self.run.checkpoint.blobs.put(pack_masks(self._decide(block, counters))))
            self.run.progress.step("voted", f"block {block.index}", block=block.index)
        inbox.clear()
        return None, MetricRecord({"num-clients": len(voters)})

    def _decide(self, block: BlockPlan, counters: dict[str, VoteCounter]) -> dict[str, torch.Tensor]:
        """Final prune masks of one block."""
        prune_masks = {}
        for linear in block.linears:
            counts = counters[linear.name].counts().reshape(linear.shape)
            tie_key = None
            if self.settings.ties == "magnitude":
                tie_key = self.run.model.checkpoint.read(linear.parameter).to(torch.float32).abs().numpy()
            prune_mask = select_most_voted(counts, self.settings.sparsity, self.settings.comparison_group, tie_key)
            prune_masks[linear.name] = torch.from_numpy(prune_mask)
        return prune_masks

    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the part of a client's masks that follows the one which has arrived."""
        header = letter.header
        if header.kind == "train":
            self._reply_hashes[header.rank] = letter.scalars["blob_sha256"]
        following = header.part + 1
        if following == len(self.parts):
            return None
        request = PartRequest(blob_sha256=[self._reply_hashes[header.rank][index] for index in self.parts[following]])
        return self.rounds.request("fetch", self.rounds.roster.seats[header.rank], header.server_round, request, part=following)

    def _note_arrival(self, letter: Letter) -> None:
        seat = self.rounds.roster.seats[letter.header.rank]
        if letter.header.kind == "train":
            seat.seconds += letter.scalars["seconds"]
            seat.metrics = {name: letter.scalars[name] for name in ("calibration_tokens", "calibration_sha256")}
        if letter.header.part + 1 == len(self.parts):
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
