"""SFT-P at a client: train masks and LoRA together, and evaluate the smaller dense model that the masks leave.

Generator and LoRA travel. The client's embedding, AdamW's moments of it, the masks and the budget stay in its private state.
"""

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from client_app import carried, tuning
from client_app.answered_once import Work, answer_once
from client_app.evaluation import answer
from client_app.kernel_mistakes import mistakes_of_kernels
from client_app.site import Site
from client_app.task_evaluation import answer_on_task, require_own_data
from espalier.corpora.own_data import require_tokens
from espalier.modeling.adapters import factors_of, merged
from espalier.modeling.edits import Edits
from espalier.modeling.opened import OpenedModel
from espalier.modeling.structured.lane_gates import LaneGates
from espalier.modeling.structured.trained_cut import cut_adapter_plan, cut_trained
from espalier.settings.mistakes import Mistake
from espalier.settings.seeds import derive_seed
from espalier.settings.sft_p import SftPSettings
from espalier.settings.task import TEXT
from espalier.storage.blobs import sha256
from espalier.storage.private import PrivateState
from espalier.training.adapted import AdaptedModel
from espalier.training.adapter_training import flat_name
from espalier.training.groups import Group
from espalier.training.mask_generator import first_embedding, gate_logits
from espalier.training.masked import EMBEDDING, Gating, MaskedTraining, first_shared
from espalier.training.sequences import client_sequences
from espalier.wire.adapters import AdapterPlan, Tensors
from espalier.wire.messages import Header, Letter, validate
from espalier.wire.payload import block_key
from espalier.wire.sft_p import lora_plan, shape_of, trained
from espalier.wire.tuning import Order, TuningReport, parts

OWN = "own"
"""Key of what a client keeps of a round for itself: its embedding and AdamW's moments of it."""
FOUND = "found"
"""Document of a round: how the budget was met, for a person who looks at a simulation."""


def train(site: Site, request: Letter) -> Letter:
    """Train the round's generator and LoRA, and reply with the first part; a round is answered once."""
    order, settings = validate(Order, request.scalars), site.settings
    plan = trained(site.model.plan, settings, order.rank_limit)

    def work(state: PrivateState) -> TuningReport:
        require_own_data(site, request.header)
        return _train(site, state, request, order.rank_limit)

    def begins_with(_: PrivateState) -> dict[str, str]:
        return {key: sha256(blob) for key, blob in tuning.brought_to(site, request, plan).items()}

    first_part = parts(plan, settings)[0]
    return answer_once(site, request, Work(TuningReport, list(plan.shapes()), first_part, work, begins_with))


def _first(site: Site) -> Tensors:
    return first_shared(site.model.plan, site.settings)


def _train(site: Site, state: PrivateState, request: Letter, rank_limit: int) -> TuningReport:
    started, header, settings = time.monotonic(), request.header, site.settings
    plan, steps = trained(site.model.plan, settings, rank_limit), settings.training.steps
    start = tuning.begins_with(site, plan, tuning.brought_to(site, request, plan), _first)
    training, first_step = _training(site, state, header), (header.server_round - 1) * settings.training.steps
    _require_enough(site, training, first_step)
    own = carried.before(state, carried.CONDITIONING, header.server_round).get(OWN, {})
    moments = {EMBEDDING: {name: own[name] for name in ("exp_avg", "exp_avg_sq", "step")}} if "step" in own else {}
    with mistakes_of_kernels():
        tensors, outcome = training.masked(start, first_step, steps, moments)
    require_tokens(site.node, training.rests_on(outcome.weighed, site.node.fewest_tokens()), REMEDY)
    after = {EMBEDDING: training.embedding, **dict(outcome.moments.get(EMBEDDING, {}))}
    carried.keep(state, carried.CONDITIONING, header.server_round, {OWN: after})
    state.save(header.server_round, FOUND, {"spent": training.spent, "target": training.target})
    return TuningReport(
        seconds=time.monotonic() - started,
        samples=training.num_sequences if settings.federation.client_weights == "samples" else 0,
        skipped_steps=outcome.skipped_steps,
        rank=rank_limit,
        blob_sha256=tuning.keep_blobs(site, state, header.server_round, tensors, start, rank_limit),
    )


REMEDY = "give the site more data, raise training.steps, training.batch-size or training.accumulation"


def _require_enough(site: Site, training: MaskedTraining, first_step: int) -> None:
    steps = range(first_step, first_step + site.settings.training.steps)
    require_tokens(site.node, training.rests_on(steps, site.node.fewest_tokens()), REMEDY)


def _training(site: Site, state: PrivateState, header: Header) -> MaskedTraining:
    """This client's training, from its own embedding."""
    settings, job, client = site.settings, site.settings.of(SftPSettings), header.client
    adapters, shape = lora_plan(site.model.plan, settings), shape_of(settings)
    rate = job.learning_rate / settings.training.learning_rate
    names = [flat_name(key, name) for key, own in shape.shapes(site.model.plan).items() for name in own]
    generator = [*names, EMBEDDING] if job.conditioned else names
    return MaskedTraining(
        model=site.model,
        computing=site.computing,
        settings=settings,
        adapters=adapters,
        sequences=client_sequences(settings, site.node, site.model, client),
        seed=derive_seed(settings.seed, "training", client=client),
        cache_folder=tuning.cache_of(site),
        groups=[Group(generator, rate, job.weight_decay)],
        shape=shape,
        gating=Gating(job.estimator, job.tau, job.bias, job.strength, job.norm),
        embedding=own_embedding(site, state, header),
        conditioned=job.conditioned,
        target=own_target(site, header),
    )


def own_embedding(site: Site, state: PrivateState, header: Header) -> Tensor:
    """What the rounds before left of the client's embedding; at first it is drawn, or the constant of all."""
    kept = carried.before(state, carried.CONDITIONING, header.server_round).get(OWN, {})
    if EMBEDDING in kept:
        return kept[EMBEDDING]
    conditioned = site.settings.of(SftPSettings).conditioned
    return first_embedding(shape_of(site.settings), site.settings.seed, header.client if conditioned else None)


def own_target(site: Site, header: Header) -> int:
    """Weights of the blocks that this client's model may have.

    Raises
    ------
    Mistake
        The share is larger than what can go.
    """
    job = site.settings.of(SftPSettings)
    share = site.node.pruned_share or job.share_of_client(header.client if site.node.simulated else 0)
    try:
        return LaneGates(site.model.plan).target(share, job.share_of)
    except Mistake as mistake:
        raise Mistake(f"{site.settings.method}.{mistake}") from None


# ----- the model that the masks leave ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmallerModel:
    """The dense model that a generator and an embedding leave, within the client's budget, and LoRA cut to its shape."""

    model: OpenedModel
    adapters: AdapterPlan
    tensors: Tensors
    """Values of LoRA."""

    @staticmethod
    def of(site: Site, header: Header, tensors: Tensors, embedding: Tensor) -> "SmallerModel":
        """Make it."""
        job, plan = site.settings.of(SftPSettings), site.model.plan
        gates = LaneGates(plan)
        logits = gate_logits(plan, shape_of(site.settings), tensors, embedding)
        biased = {gate: own + job.bias for gate, own in logits.items()}
        chosen = gates.chosen(biased, own_target(site, header) if job.masks == "budget" else None)
        structure = gates.structure(chosen, norm_of_read=job.norm == "read")
        adapters = cut_adapter_plan(lora_plan(plan, site.settings), plan, structure)
        smaller = OpenedModel(site.model.directory, structure)
        return SmallerModel(smaller, adapters, cut_trained(_lora_of(tensors), plan, structure))

    @property
    def edits(self) -> Edits:
        """What merges LoRA into it."""
        return merged(lambda index: factors_of(self.adapters, index, self.tensors.get(block_key(index), {})))

    def loaded(self, site: Site) -> Any:
        """All of it in memory, with LoRA."""
        adapted = AdaptedModel.load(self.model, site.computing, site.settings, self.adapters, tuning.cache_of(site))
        adapted.set(self.tensors)
        return adapted.whole


def _lora_of(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    found = {key: {name: value for name, value in own.items() if ".lora_" in name} for key, own in tensors.items()}
    return {key: own for key, own in found.items() if own}


def evaluate(site: Site, request: Letter) -> Letter:
    """Losses of the client's own smaller model, on public text or items, and on its own beside those of the dense model."""
    header, settings = request.header, site.settings
    state, plan = site.state(header), trained(site.model.plan, settings)
    after = header.model_copy(update={"server_round": header.server_round + 1})
    tensors = tuning.begins_with(site, plan, tuning.delivered_to(site, after, len(parts(plan, settings))), _first)
    mine = SmallerModel.of(site, header, tensors, own_embedding(site, state, after))
    if settings.task.name == TEXT:
        return answer(site, request, (mine.model, mine.edits), lambda: (mine.model, mine.edits))

    def model_of(name: str) -> Any:
        if name != "dense":
            return mine.loaded(site)
        return AdaptedModel.load(site.model, site.computing, settings, AdapterPlan({}), tuning.cache_of(site)).whole

    return answer_on_task(site, request, model_of)
