"""Pooled pruning: masks by Wanda or RIA on sums of squared inputs of all clients.

The weights are known to the server, and the metrics need only the sum of squares of each input
channel over all calibration tokens (Wanda: Sun et al. 2023, eq. 1; RIA: Zhang et al. 2024, eq. 4).
Sums are added in fixed point, so the order of clients and the number of workers have no effect. The
masks are those of a centralized run on all samples, if ``federation.aggregation-rule`` is ``mean``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.pooled_sums import masks_by_sums
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.pruning.pooled_pruning import (
    COUNT,
    PooledPruningSettings,
    decided_parts,
    fraction_bits,
    max_count,
    shared_inputs,
    squares_name,
)
from espalier.models.plan import BlockPlan, block_key
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.fixed_point import Words as FixedPoint
from pruning_kernels.fixed_point import from_words, summed
from pruning_kernels.lora.clipping import MIN_CLIENTS, within_ratio
from pruning_kernels.selection.scores import NotFiniteError
from pruning_kernels.trimmed_mean import trimmed_mean
from pruning_kernels.votes.bitmask import Words
from pruning_kernels.votes.bitmask_on_device import pack_tensor
from pruning_kernels.wide_integers import from_wide
from strategies.averaging.client_weights import note_claims, up_to_median
from strategies.averaging.updates import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ProgressWords
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums
from strategies.masks import Masking, MaskResult


class PooledResult(MaskResult):
    """Masks, and the sums from which they follow."""

    STATE = ("mask_blobs", "sum_blobs", "counts")

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        super().__init__(settings, model, store)
        self.sum_blobs: list[str] = []
        """Hash of the sums of each decided block."""
        self.counts: list[int] = []
        """Number of tokens, or of clients that count equally, in the sums of each block.

        They differ if a client is lost between the rounds of iterative pruning.
        """

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return [*self.mask_blobs, *self.sum_blobs]

    def keep_sums(self, sums: dict[str, Tensor], count: int) -> None:
        """Store the sums of the next block, float64, by the first matrix of each input."""
        numbers = {name: values.numpy() for name, values in sums.items()}
        self.sum_blobs.append(self.store.put(pack_tensors(numbers)))
        self.counts.append(count)

    def sums(self, index: int) -> dict[str, Tensor]:
        """Return the sums of squares of a block, float64, by the first matrix of each input."""
        arrays = unpack_tensors(self.store.get(self.sum_blobs[index]))
        # Unpacked values are read-only; torch needs memory that it may write.
        return {name: torch.from_numpy(values.copy()) for name, values in arrays.items()}

    def report(self) -> dict[str, Any]:
        """Return the count of the sums, by its unit; a list by block if they differ."""
        count = self.counts[0] if len(set(self.counts)) == 1 else self.counts
        weighting = self.run_settings.of(PooledPruningSettings).weighting
        if self.run_settings.privacy.on:
            return {"num_summed_clients": count}
        return {"tokens" if weighting == "tokens" else "clients_in_the_mean": count}


class PooledPruning(Masking):
    """Strategy of pooled pruning."""

    WORDS = ProgressWords("sums", "sums", "sums")
    result: PooledResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.settings = run.settings.of(PooledPruningSettings)
        self.federation = run.settings.federation
        self.result = PooledResult(run.settings, run.model, run.checkpoint.blobs)

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        rule = self.federation.rule_in_words
        if self.federation.clips:
            rule = f", clients within {self.federation.max_update_ratio:g} times"
        return (
            f"{amount}, {job.strategy}, {job.metric} by {job.server_group}, weighted by"
            f" {self._weighting()}{rule}"
        )

    def _weighting(self) -> str:
        if self.run.settings.privacy.on:
            return "records"
        return "tokens" if self.settings.weighting == "tokens" else "clients"

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Add the sums block by block, and decide the masks."""
        blocks = self.blocks_of_round(server_round)
        limits = UpdateLimits(self.federation.update_limit)
        self.run.progress.begin("pruning", len(blocks))
        for index in blocks:
            block = self.run.model.plan.blocks[index]
            replies = {client: BlockSums(inbox, client, index) for client in clients}
            # Counts are limited first, since they weight the numbers of every channel.
            counts = self._counts({client: reply.count for client, reply in replies.items()})
            sums = {
                name: self._sum(name, replies, counts, limits)
                # Matrices with the same input share its sums, so each input appears once.
                for name in sorted(set(shared_inputs(block).values()))
            }
            self._decide(block, sums, sum(counts.values()))
        limits.tell(self.rounds, "sums")

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Decide the masks on the clients' sums; they are those of ``fold``, bit for bit.

        No single reply was seen. So what no honest clients can send is limited here.
        """
        most = max_count(self.run.settings) * len(clients)
        blocks = self.blocks_of_round(server_round)
        self.run.progress.begin("pruning", len(blocks))
        for index in blocks:
            block = self.run.model.plan.blocks[index]
            key = block_key(index)
            squares = {
                name: self._numbers(from_wide(sums.tensor(key, squares_name(name))))
                for name in sorted(set(shared_inputs(block).values()))
            }
            counted = min(max(int(sums.tensor(key, COUNT)[0]), 1), most)
            self._decide(block, squares, counted)

    def _decide(self, block: BlockPlan, sums: dict[str, Tensor], count: int) -> None:
        self.result.keep_sums(sums, count)
        self.result.keep_masks(self._masks(block, sums))
        self.run.progress.step("pruned", f"block {block.index}", block=block.index)

    def _counts(self, claimed: dict[int, int]) -> dict[int, int]:
        """Return each client's count; all rules but the mean limit it relative to the median."""
        if not self._compares(len(claimed)):
            return claimed
        as_floats = {client: float(count) for client, count in claimed.items()}
        counted = up_to_median(as_floats, self.federation.max_weight_ratio)
        note_claims(self.rounds, "count", as_floats, counted)
        return {client: round(count) for client, count in counted.items()}

    def _sum(
        self,
        name: str,
        replies: Mapping[int, "BlockSums"],
        counts: Mapping[int, int],
        limits: UpdateLimits,
    ) -> Tensor:
        """Return the sum of all clients' numbers by the rule; for a mean the exact one."""
        bits = fraction_bits(self.run.settings)
        words = {client: reply.words(name) for client, reply in replies.items()}
        # Exact in fixed point: the sum over all clients, which a mean uses directly.
        exact = self._numbers(summed(list(words.values())))
        if not self._compares(len(replies)):
            return exact
        # Per token or client, so that clients with different counts can be compared.
        sent = torch.stack(
            [from_words(values, bits) / replies[k].count for k, values in words.items()]
        )
        if trim := self.federation.trim(len(replies)):
            weighed = [float(counts[client]) for client in replies]
            return trimmed_mean(list(sent), weighed, trim) * sum(weighed)
        # Clip per channel relative to the median.
        limited = within_ratio(sent, self.federation.max_update_ratio)
        for place, client in enumerate(replies):
            if (beyond := sent[place] != limited[place]).any():
                high = torch.maximum(sent[place], limited[place])[beyond]
                low = torch.minimum(sent[place], limited[place])[beyond].clamp(min=1e-300)
                excess = float((high / low).max())
                limits.note(client, (replies[client].index, name), excess, 1.0)
        weights = torch.tensor([counts[client] for client in replies], dtype=torch.float64)
        # With all counts unchanged, only channels that were clipped differ from the exact sum.
        untouched = all(counts[client] == reply.count for client, reply in replies.items())
        # Numbers that no limit changes stay those of the pooled samples, bit by bit.
        changed = (sent != limited).any(dim=0) if untouched else torch.ones_like(exact).bool()
        return torch.where(changed, (limited * weights[:, None]).sum(dim=0), exact)

    def _numbers(self, total: FixedPoint) -> Tensor:
        """Return a sum of all clients, (channels,), float64."""
        numbers = from_words(total, fraction_bits(self.run.settings))
        # Noise can make a sum of squares negative, and so can a client that lies in a secure sum.
        return numbers.clamp(min=0)

    def _compares(self, num_clients: int) -> bool:
        """Return whether clients are compared with each other."""
        return self.federation.aggregation_rule != "mean" and num_clients >= MIN_CLIENTS

    def _masks(self, block: BlockPlan, sums: Mapping[str, Tensor]) -> dict[str, Words]:
        """Return the packed prune masks of a block, by canonical linear name."""
        try:
            # The metric is computed as by one party that has the sums.
            masks = masks_by_sums(self.run.model, block, sums, self.settings, self.run.device)
        except NotFiniteError as error:
            raise InputError(f"{self.run.model.directory}, block {block.index}: {error}") from error
        return {name: pack_tensor(mask) for name, mask in masks.items()}

    def parts_of_decided(self, decided: int) -> list[range]:
        """Return the block numbers of each part in which the first blocks are pushed."""
        return decided_parts(self.run.model.plan, self.run.settings, decided)


@dataclass(frozen=True)
class BlockSums:
    """Sums of one client in a block."""

    inbox: Inbox
    client: int
    index: int

    @property
    def count(self) -> int:
        """Count that the client reports."""
        return int(self.inbox.tensor(self.client, block_key(self.index), COUNT))

    def words(self, name: str) -> FixedPoint:
        """Return the sums of one input in fixed point, (2, channels), uint64."""
        tensor = self.inbox.tensor(self.client, block_key(self.index), squares_name(name))
        words: FixedPoint = tensor.numpy()
        return words
