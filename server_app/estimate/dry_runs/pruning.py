"""Dry runs of the methods that prune without training adapters."""

from collections.abc import Mapping
from itertools import chain

from torch import Tensor

from espalier.messages.blobs.cuts import pack_cut
from espalier.methods.fedprllm import blocks_of_round
from espalier.methods.fedspallm import FedSpaLLMSettings, num_kept, sparsity_of
from espalier.methods.llm_pruner import LlmPrunerSettings
from espalier.methods.llm_streamline import layer_shapes
from espalier.methods.slicegpt import places
from espalier.models.groups import Groups
from espalier.models.plan import BlockPlan
from espalier.settings.run import RunSettings
from pruning_kernels.selection.selection import pruned_in_matrix
from server_app.estimate.dry_runs.dry_run import DryRun
from strategies.base.inbox import Inbox
from strategies.cuts import CutResult, Editing
from strategies.fedprllm import FedPrLLM
from strategies.fedspallm.strategy import FedSpaLLM
from strategies.llm_pruner import LlmPruner
from strategies.llm_streamline import LlmStreamline, StreamlinedResult
from strategies.slicegpt import SliceGpt

NO_BLOB = ""
"""Hash under which a store of a dry run has empty bytes."""


class DryEditing(DryRun, Editing):
    """Dry run of a method that edits weights by tensors."""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Make a result with the blobs of a reply."""
        parts = self.order(server_round, clients[0]).parts
        self.result.hashes = dict.fromkeys(chain.from_iterable(parts), NO_BLOB)


class DryFedPrLLM(DryRun, FedPrLLM):
    """Dry run of FedPrLLM: all clients vote on the blocks of a round."""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Decide the blocks of a round."""
        blocks = len(blocks_of_round(self.run.model.plan, self.settings, server_round))
        self.result.mask_blobs += [NO_BLOB] * blocks
        self.result.count_blobs += [NO_BLOB] * blocks
        self.result.num_voters += [len(clients)] * blocks


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
        for index in sorted({index for sampled in sampled for index in sampled}):
            senders = sum(index in sampled for sampled in sampled)
            self.result.versions[index] = server_round
            self.result.num_kept[index] = self._kept(self.plan.blocks[index], senders)

    def _kept(self, block: BlockPlan, senders: int) -> list[int]:
        """Return the number of weights that each matrix keeps.

        Without mask expansion a weight is pruned only if all senders prune it. Their masks are
        equal in the case of the least bytes, independent usually, and disjoint in the other case.
        """
        server_round = self.rounds.finished + 1
        if self.settings.mask_expansion:
            sparsity = sparsity_of(self.run.settings, server_round)
            group = self.settings.server_group
            return [
                linear.num_weights - pruned_in_matrix(linear.shape, sparsity, group)
                for linear in block.linears
            ]
        kept = []
        for linear in block.linears:
            local = num_kept(block, self.run.settings, server_round)[linear.name]
            gone = 1 - local / linear.num_weights
            independent = round(linear.num_weights * (1 - gone**senders))
            disjoint = min(linear.num_weights, senders * local)
            kept.append({"least": local, "usual": independent, "most": disjoint}[self.case])
        return kept


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
        """Cut the same fraction of each kind of groups in each block."""
        if server_round > 1:
            return
        groups = Groups.of(self.plan)
        cut = groups.none
        for pool, count in enumerate(groups.counts.tolist()):
            cut[groups.span(range(pool, pool + 1))][: self._gone(count)] = True
        self.result.keep(pack_cut(groups, cut, block.index) for block in self.plan.blocks)

    def _gone(self, number: int) -> int:
        """Return the number of groups that are cut.

        The least bytes come from none, because then there are no equations. The usual number
        follows from the pruning ratio. The most bytes come from a cut of one group.
        """
        usual = min(number - 1, max(1, round(self.job.pruning_ratio * number)))
        return {"least": 0, "usual": usual, "most": 1}[self.case]


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
    """Dry run of LLM-Streamline, which removes the first stretch: all blocks have equal shapes."""

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Choose a stretch and train a layer."""
        run = self.run
        self.result = LayerShapes(run.settings, run.model, run.checkpoint.blobs)
        self.result.start = 0
        self.result.sent = dict.fromkeys(layer_shapes(self.run.model.plan.blocks[0]), NO_BLOB)
