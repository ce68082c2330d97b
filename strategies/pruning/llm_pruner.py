"""Federated LLM-Pruner (Ma et al. 2023).

Paper: "LLM-Pruner: On the Structural Pruning of Large Language Models".
Every client computes the gradient of its loss. For each prunable group (a key-value group or a
channel, with all coupled weights), it sends the sum of weights times gradients. The server adds the
clients' scores and removes the groups with the lowest score. The first and last blocks are kept
(section 4.1). A separate run fine-tunes the result: ``espalier run fedpetuning model=runs/...``.

With the corresponding settings, Mask Tuning (Kwon et al. 2022) is included. Clients also send
Fisher information, which guides the search for the cut and its rearrangement. In a second round
they send normal equations for scales of the remaining groups, which the server adds and solves.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from espalier.hf.group_scores.mask_tuning import RESCALE_DAMPING, scaled_cuts, scales_or_none
from espalier.hf.group_scores.taylor import read_factor, taylor_cut
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.cuts import MAX_SCALE, pack_cut, read_cut
from espalier.methods.pruning.llm_pruner import (
    AIMS,
    JOINT,
    LlmPrunerSettings,
    cut_blocks,
    equation_key,
    equation_places,
    fisher_name,
    require_sendable,
    score_name,
    score_scale,
)
from espalier.models.groups import Cut, Groups
from espalier.models.plan import block_key
from espalier.models.structure import GROUP_KINDS
from espalier.models.triangles import ROUNDING, diagonal_of
from espalier.settings.run import RunSettings
from pruning_kernels.groups.mask_tuning import is_positive
from pruning_kernels.groups.slicing import unpacked
from pruning_kernels.lora.clipping import SINGLE_NUMBERS, within_band, within_ratio
from strategies.averaging.client_weights import count_sizes
from strategies.averaging.updates import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums
from strategies.cuts import CutResult, require_cuttable


class LlmPruner(Method):
    """Strategy of LLM-Pruner: summed first-order scores or Fisher information, optional scales."""

    WORDS = ProgressWords("scores", "scores", "scores")
    result: CutResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(LlmPrunerSettings)
        self.plan = run.model.plan
        self.groups = Groups.of(self.plan)
        self.result = CutResult(run, scaled=self.job.rescaled)
        self.limits = UpdateLimits(SINGLE_NUMBERS * run.settings.federation.update_limit)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a model that cannot be cut, and equations that do not fit in a message."""
        job = settings.of(LlmPrunerSettings)
        blocks = cut_blocks(model.plan, job)
        require_cuttable(settings, model, blocks)
        require_sendable(model.plan, job)

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.job
        spared = f"{job.spare_first} first and {job.spare_last} last blocks spared"
        refined = {"rearranged": job.rearrange, "rescaled": job.rescale}
        then = "".join(f", {kinds} {how}" for how, kinds in refined.items() if kinds != "off")
        return (
            f"{job.pruning_ratio:.0%} of the blocks' parameters, {job.element} sums,"
            f" {job.selection} comparison, {spared}{then}"
        )

    # ----- messages -------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to score all groups, or in round 2 to measure the remaining ones.

        In round 2 each request has the cut, because it determines the shapes.
        """
        if server_round == 1:
            return ClientOrder()
        cut = {block_key(block.index): self.result.blob(block.index) for block in self.plan.blocks}
        return ClientOrder(along=cut, sends="normal equations")

    def _cut(self) -> Cut:
        return read_cut(self.groups, self.result.blob)

    # ----- replies --------------------------------------------------------------------------------

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return why normal equations are not Gram matrices, whose sum has a solution."""
        places = equation_places(self.plan, self._cut(), self.job) if self.rounds.finished else ()
        for place in places:
            joint, _ = self._equations(inbox, client, place)
            # The damping allows for float32 rounding, by which valid equations have eigenvalues
            # slightly below 0.
            if not is_positive(joint, RESCALE_DAMPING):
                return (
                    f"{equation_key(*place)}: the numbers are not inner products of the outputs of"
                    " groups"
                )
        return None

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Aggregate scores and decide the cut, or aggregate equations and solve for scales.

        Scores arrive in round 1, equations in round 2.
        """
        if server_round == 1:
            self._keep(self._chosen(inbox, clients))
        else:
            self._rescale(inbox, clients)

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Decide the cut by the sums of the scores."""
        scale = score_scale(self.run.settings)
        scores = {
            index: {
                kind: sums.numbers(block_key(index), score_name(kind), scale)
                for kind in GROUP_KINDS
            }
            for index in cut_blocks(self.plan, self.job)
        }
        self._keep(taylor_cut(self.run.model, scores, self.job))

    def _keep(self, cut: Cut) -> None:
        """Store a cut of all blocks."""
        blocks = self.plan.blocks
        self.result.keep(pack_cut(self.groups, cut, block.index) for block in blocks)

    def push_result(self, server_round: int) -> None:
        """Push the decisions to the clients, for the evaluation on their own text."""
        self.result.push(server_round)

    def _chosen(self, inbox: Inbox, clients: list[int]) -> Cut:
        blocks = cut_blocks(self.plan, self.job)
        names = [(index, kind) for index in blocks for kind in GROUP_KINDS]
        # 1. Read all scores.
        sent = {
            client: [
                inbox.tensor(client, block_key(index), score_name(kind)).double()
                for index, kind in names
            ]
            for client in clients
        }
        # 2. Limit each client's total, then each group's score relative to the median.
        sizes = {
            c: float(sum(scores.abs().sum() for scores in tensors)) for c, tensors in sent.items()
        }
        factor = count_sizes(self.rounds, "scores", sizes)
        scores: dict[int, dict[str, Tensor]] = {index: {} for index in blocks}
        counted: dict[tuple[int, str], list[Tensor]] = {}
        for place, (index, kind) in enumerate(names):
            # The factor makes all scores of one client smaller alike.
            limited = self._limited(
                {client: sent[client][place] * factor[client] for client in clients}, (index, kind)
            )
            scores[index][kind] = sum(limited, start=torch.zeros(()))
            counted[index, kind] = limited
        # 3. Choose groups, with Fisher information if the settings use it.
        self.limits.tell(self.rounds, "scores of groups")

        def fisher_of(index: int, kind: str) -> Tensor:
            """Return the Fisher factors of all clients, stacked along the rows."""
            samples = self.run.settings.data.num_samples
            flat = (inbox.tensor(client, block_key(index), fisher_name(kind)) for client in clients)
            client_factors = (
                # Information is a square, so its factor gets the root.
                read_factor(tensor, len(scores[index][kind]), samples) * factor[c] ** 0.5
                for c, tensor in zip(clients, flat, strict=True)
            )
            scored = zip(client_factors, counted[index, kind], strict=True)
            # Stacked factors of the clients: F^T F is the sum of their information.
            return torch.cat([_within_scores(fisher, limits) for fisher, limits in scored])

        return taylor_cut(self.run.model, scores, self.job, fisher_of)

    def _limited(self, scores: Mapping[int, Tensor], place: tuple[int, str]) -> list[Tensor]:
        """Return the scores of one kind in a block, limited relative to the median, by client."""
        if self.limits.off:
            return list(scores.values())
        limited_scores = []
        # Scores can have either sign; their magnitudes are compared.
        sizes = torch.stack([values.abs() for values in scores.values()])
        for (client, values), size, limited in zip(
            scores.items(), sizes, within_ratio(sizes, self.limits.max_ratio), strict=True
        ):
            beyond = limited != size
            if bool(beyond.any()):
                # A score of 0 has no ratio.
                smaller = torch.minimum(size, limited).clamp(min=1e-300)
                worst = int((torch.maximum(size, limited) / smaller).argmax())
                self.limits.note(client, place, float(size[worst]), float(limited[worst]))
                # Keep the sign.
                values = torch.where(beyond, limited.copysign(values), values)
            limited_scores.append(values)
        return limited_scores

    # ----- scales ---------------------------------------------------------------------------------

    def _equations(
        self, inbox: Inbox, client: int, place: tuple[int, str]
    ) -> tuple[Tensor, Tensor]:
        """Return joint matrix and aims of a client's normal equations: float64."""
        key = equation_key(*place)
        aims = inbox.tensor(client, key, AIMS).double()
        # The matrix is symmetric; its upper triangle is sent.
        return unpacked(inbox.tensor(client, key, JOINT).double(), len(aims)), aims

    def _rescale(self, inbox: Inbox, clients: list[int]) -> None:
        cut = self._cut()
        places = equation_places(self.plan, cut, self.job)
        sizes = {client: self._size(inbox, client, places) for client in clients}
        factor = count_sizes(self.rounds, "equations", sizes)
        refused: list[tuple[int, str]] = []
        blobs = []
        self.run.progress.begin("rescaling", len(self.plan.blocks))
        for index, (blob, scales) in enumerate(
            # Blocks are solved one by one, so that memory holds one block's equations.
            scaled_cuts(self.groups, cut, self._scales(inbox, factor, refused), self.job)
        ):
            blobs.append(blob)
            kept = {
                kind: values[~cut[self.groups.at(index, kind)]] for kind, values in scales.items()
            }
            factors = ", ".join(
                f"{kind} by {values.min():.2f} to {values.max():.2f}"
                for kind, values in kept.items()
            )
            self.run.progress.step("rescaled", f"block {index}: {factors}", block=index)
        self.limits.tell(self.rounds, "equations of groups")
        self.result.replace(blobs)
        if refused:
            names = ", ".join(f"{kind} of block {index}" for index, kind in refused)
            text = f"not rescaled {names}: a scale would be beyond {MAX_SCALE:g}"
            self.run.progress.note("unscaled", text, places=[list(place) for place in refused])

    def _scales(
        self, inbox: Inbox, factor: Mapping[int, float], refused: list[tuple[int, str]]
    ) -> Callable[[int, str], Tensor | None]:
        """Return a function that solves the summed equations of a place, or notes a refusal."""

        def of(index: int, kind: str) -> Tensor | None:
            joint = torch.zeros(())
            aims = torch.zeros(())
            # Equations of all clients for one place.
            equations = self._limited_equations(inbox, list(factor), (index, kind))
            for client, counts in factor.items():
                own_joint, own_aims = equations[client]
                joint = joint + own_joint * counts
                aims = aims + own_aims * counts
            scales = scales_or_none((joint, aims))
            if scales is None:
                refused.append((index, kind))
            return scales

        return of

    def _limited_equations(
        self, inbox: Inbox, clients: Sequence[int], place: tuple[int, str]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the normal equations of a place, limited relative to the median client.

        For each group, both its own squared output and the ratio of its aim to that square are kept
        near the median. A joint matrix is scaled on both sides, so that it stays a Gram matrix.
        """
        equations = {client: self._equations(inbox, client, place) for client in clients}
        squares = torch.stack([joint.diagonal().clamp(min=0) for joint, _ in equations.values()])
        shares = torch.stack([aims for _, aims in equations.values()]) / squares.where(
            squares > 0, torch.ones(()).double()
        )
        # Products of two groups' outputs vary twice as much in exponent as scores do.
        max_ratio = self.limits.max_ratio**2
        within = within_ratio(squares, max_ratio)
        near = within_band(shares, max_ratio)
        for row, client in enumerate(clients):
            # Rescaling rows and columns by s keeps the matrix positive semidefinite; diagonals
            # scale by s^2.
            scales = torch.where(
                within[row] != squares[row],
                (within[row] / squares[row].clamp(min=1e-300)).sqrt(),
                1.0,
            )
            if bool((scales != 1).any()) or bool((near[row] != shares[row]).any()):
                joint, _ = equations[client]
                # The aim keeps its limited ratio to the limited square.
                equations[client] = joint * scales[:, None] * scales, near[row] * within[row]
                largest = max(float(scales.max()), 1 / float(scales.min().clamp(min=1e-8))) ** 2
                self.limits.note(client, place, largest, 1.0)
        return equations

    def _size(self, inbox: Inbox, client: int, places: Sequence[tuple[int, str]]) -> float:
        """Return the sum of a client's own squared outputs and absolute aims, over the places."""
        total = 0.0
        for place in places:
            key = equation_key(*place)
            aims = inbox.tensor(client, key, AIMS).double()
            squares = diagonal_of(inbox.tensor(client, key, JOINT).numpy(), len(aims))
            total += float(squares.sum()) + float(aims.abs().sum())
        return total


def _within_scores(factor: Tensor, scores: Tensor) -> Tensor:
    """Return a Fisher factor, (rows, groups), whose column squares sum to at most the score."""
    squares = factor.square().sum(dim=0)
    # Rounding of float32 is not taken for a violation.
    beyond = squares > scores * (1 + ROUNDING)
    return torch.where(beyond, factor * (scores / squares.clamp(min=1e-300)).sqrt(), factor)
