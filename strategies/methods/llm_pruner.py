"""LLM-Pruner, federated (Ma et al. 2023, "LLM-Pruner: On the Structural Pruning of Large Language Models").

Every client takes the gradient of its loss and sends for each unit, a key-value group or a channel with all weights that hang
on it, weights times gradients, summed. The server adds the clients' scores up and cuts the units of lowest score; the first and
last blocks stay whole (section 4.1). What is left is tuned by a run of its own: ``espalier run fedpetuning model=runs/...``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.modeling.structured.taylor import taylor_cuts
from espalier.settings.llm_pruner import LlmPrunerSettings
from espalier.settings.run import RunSettings
from espalier.wire.cuts import KINDS
from espalier.wire.llm_pruner import cut_blocks, score_name, score_specs
from espalier.wire.parts import parts_of
from espalier.wire.payload import block_key
from espalier.wire.plan import ModelPlan
from strategies.engine.capped import count_claims
from strategies.engine.inbox import Inbox
from strategies.methods.cutting import Cutting


class LlmPruner(Cutting):
    """Summed first-order scores.

    Takes what ``Method`` does.
    """

    SENT = "scores"
    STEPS = ("scores", "scores")

    @classmethod
    def blocks(cls, settings: RunSettings, plan: ModelPlan) -> range:
        """Those that are not spared."""
        return cut_blocks(plan, settings.of(LlmPrunerSettings))

    def summary(self) -> None:
        """Show what will be done."""
        job = self.run.settings.of(LlmPrunerSettings)
        spared = f"{job.spare_first} first and {job.spare_last} last blocks spared"
        text = f"{job.share:.0%} of the {job.share_of}' parameters, {job.element} sums, {job.selection} comparison, {spared}"
        self.run.progress.note("method", f"llm-pruner   {text}")

    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """Whole blocks' scores."""
        specs = score_specs(self.run.model.plan, self.run.settings.of(LlmPrunerSettings))
        return parts_of(specs, self.run.settings.part_bytes)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Add the scores up and decide what is cut."""
        job, plan = self.run.settings.of(LlmPrunerSettings), self.run.model.plan
        names = [(index, kind) for index in cut_blocks(plan, job) for kind in KINDS]
        sent = {
            client: [inbox.tensor(client, block_key(index), score_name(kind)).double() for index, kind in names]
            for client in clients
        }
        sizes = {client: float(sum(scores.abs().sum() for scores in own)) for client, own in sent.items()}
        counted = count_claims(self.rounds, "scores", sizes, job.max_score_ratio)
        factor = {client: counted[client] / size if size else 1.0 for client, size in sizes.items()}
        scores: list[dict[str, Tensor]] = [{} for _ in cut_blocks(plan, job)]
        for place, (index, kind) in enumerate(names):
            of_all = (sent[client][place] * factor[client] for client in clients)
            scores[index - job.spare_first][kind] = sum(of_all, start=torch.zeros(()))
        self.keep(taylor_cuts(self.run.model, scores, job))
