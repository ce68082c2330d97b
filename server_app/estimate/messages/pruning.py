"""Dry runs of the methods that prune without training adapters: what each round leads to."""

from collections.abc import Mapping
from itertools import chain

from torch import Tensor

from espalier.messages.blobs.cuts import pack_cut
from espalier.messages.message import NoFields
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings, num_kept
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.methods.pruning.llm_streamline import layer_shapes, num_starts
from espalier.methods.pruning.slicegpt import places
from espalier.models.groups import Groups
from espalier.models.plan import BlockPlan
from espalier.settings.run import RunSettings
from server_app.estimate.messages.dry_run import DryRun
from strategies.base.inbox import Inbox
from strategies.cuts import CutResult, Editing
from strategies.pruning.fedprllm import FedPrLLM
from strategies.pruning.fedspallm.strategy import FedSpaLLM
from strategies.pruning.llm_pruner import LlmPruner
from strategies.pruning.llm_streamline import LlmStreamline, StreamlinedResult
from strategies.pruning.pooled_pruning import PooledPruning
from strategies.pruning.slicegpt import SliceGpt

NO_BLOB = ""
"""Hash under which a store of a dry run has empty bytes."""


class DryEditing(DryRun, Editing):
    """Dry run of a method that edits weights by tensors."""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Make a result with the blobs of a reply."""
        parts = self.rounds.request("train", 0, server_round, NoFields()).contract.parts
        self.result.hashes = dict.fromkeys(chain.from_iterable(parts), NO_BLOB)


class DryFedPrLLM(DryRun, FedPrLLM):
    """Dry run of FedPrLLM: all clients vote on the blocks of a round."""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Decide the blocks of a round."""
        blocks = len(self.blocks_of_round(server_round))
        self.result.mask_blobs += [NO_BLOB] * blocks
        self.result.count_blobs += [NO_BLOB] * blocks
        self.result.num_voters += [len(clients)] * blocks


class DryPooledPruning(DryRun, PooledPruning):
    """Dry run of pooled pruning: the server decides the blocks of a round."""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Decide the blocks of a round."""
        blocks = len(self.blocks_of_round(server_round))
        self.result.mask_blobs += [NO_BLOB] * blocks
        self.result.sum_blobs += [NO_BLOB] * blocks


class DryFedSpaLLM(DryRun, FedSpaLLM):
    """Dry run of FedSpaLLM: layers are sampled as for nodes of equal capability."""

    @classmethod
    def open_questions(cls, settings: RunSettings) -> str:
        """Return what the size depends on: capabilities, and overlap of pruned weights."""
        job = settings.of(FedSpaLLMSettings)
        open_ones = []
        if not job.capabilities and job.sampled_layers < 1:
            open_ones.append("layers are sampled as for nodes of equal capability")
        if not job.mask_expansion:
            open_ones.append(
                "without mask expansion the global model keeps more weights the less clients agree"
            )
        return "; ".join(open_ones)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Prune the sampled layers of the global model."""
        sampled = [self._sampled[client] for client in clients]
        self.result.note_local_models(sampled, server_round)
        for index in sorted({index for blocks in sampled for index in blocks}):
            senders = sum(index in blocks for blocks in sampled)
            self.result.versions[index] = server_round
            self.result.num_kept[index] = self._kept(self.plan.blocks[index], senders)

    def _kept(self, block: BlockPlan, senders: int) -> list[int]:
        """Return the number of weights that each matrix keeps.

        Without mask expansion a weight is pruned only if all senders prune it. Their masks are
        equal in the case of the least bytes, and disjoint in the other case.
        """
        local = num_kept(block, self.run.settings, self.rounds.finished + 1)
        disjoint = self.case == "most" and not self.settings.mask_expansion
        times = senders if disjoint else 1
        # Disjoint sets of kept weights add up, at most to the whole matrix.
        return [min(linear.num_weights, times * local[linear.name]) for linear in block.linears]


class DryCutting(DryRun):
    """Dry run of a method that removes prunable groups."""

    result: CutResult

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Decide a cut of every block."""
        self.result.keep(b"" for _ in self.run.model.plan.blocks)


class DryLlmPruner(DryCutting, LlmPruner):
    """Dry run of LLM-Pruner, whose second round depends on the number of removed groups."""

    @classmethod
    def open_questions(cls, settings: RunSettings) -> str:
        """Return what the size depends on; empty without ``rescale``."""
        return "which groups are cut" if settings.of(LlmPrunerSettings).rescaled else ""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Cut nothing, so that there are no equations, or one group of each kind in each block."""
        if server_round > 1:
            return
        groups = Groups.of(self.plan)
        cut = groups.none
        for pool in range(len(groups.counts) if self.case == "most" else 0):
            cut[groups.span(range(pool, pool + 1))][:1] = True
        self.result.keep(pack_cut(groups, cut, block.index) for block in self.plan.blocks)


class DrySliceGpt(DryRun, SliceGpt):
    """Dry run of SliceGPT."""

    def before_round(self, server_round: int) -> bool:
        """Read no public text."""
        return False

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Find a basis for each place."""
        self.result.bases = [NO_BLOB for _ in places(self.plan)]


class LayerShapes(StreamlinedResult):
    """Result of LLM-Streamline without values."""

    def received(self) -> Mapping[str, Tensor]:
        """Return no tensors."""
        return {}


class DryLlmStreamline(DryRun, LlmStreamline):
    """Dry run of LLM-Streamline, which replaces the stretch with the largest first block."""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Choose a stretch and train a layer."""
        run = self.run
        plan = run.model.plan
        starts = plan.blocks[: num_starts(plan, run.settings)]
        largest = max(starts, key=lambda block: block.num_weights)
        self.result = LayerShapes(run.settings, run.model, run.checkpoint.blobs)
        self.result.start = largest.index
        self.result.sent = dict.fromkeys(layer_shapes(largest), NO_BLOB)
