"""SFT-P at a client: joint training of masks and LoRA, and evaluation of the smaller dense model.

Mask generator and LoRA are sent. The client's embedding, AdamW's moments for it, the masks and the
budget stay in its client state. A client that joins after the last round fits its embedding to the
final generator and LoRA.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client_app.methods.tuning import adapter_averaging, round_adapters
from client_app.methods.tuning.personal_model import own_folder, write_own
from client_app.protocol import client_state
from client_app.protocol.answer_once import answer_once
from client_app.protocol.errors import kernel_errors
from client_app.protocol.evaluation import (
    Evaluation,
    prepare_evaluation,
    prepare_task_evaluation,
    require_many_at_a_site,
    require_own_data,
)
from client_app.protocol.local_baseline import make_local_baseline
from client_app.protocol.push import pushed_blobs, result_header, start_blobs, start_hashes
from client_app.site import Site
from espalier.data.client_text import validation_samples
from espalier.errors import EspalierError, InputError, StateLost
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits
from espalier.hf.structured.residual_gates import Gate, ResidualGates
from espalier.hf.structured.selection import cut_adapter_plan, cut_trained
from espalier.hf.whole.adapters import merged
from espalier.messages.evaluation import Losses
from espalier.messages.local_baseline import BaselineOrder
from espalier.messages.message import Header, MessageBody, validate
from espalier.methods.tuning.adapters.contract import Order, TuningReport
from espalier.methods.tuning.adapters.tensors import parts
from espalier.methods.tuning.sft_p import BIAS, SftPSettings, lora_plan, shape_of, trained
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.seeds import derive_seed
from espalier.settings.tables.task import TEXT
from espalier.storage.client_state import PrivateState
from espalier.training import mask_history
from espalier.training.adapted_model import flat_name
from espalier.training.masked_training import (
    EMBEDDING,
    MaskedTraining,
    budget_input,
    first_embedding,
    first_shared,
    gate_logits,
    of_generator,
)
from espalier.training.sequences import client_sequences


@dataclass(frozen=True)
class SmallerModel:
    """Smaller dense model, given by a generator and an embedding, with LoRA cut to its shape."""

    chosen: Mapping[Gate, Tensor]
    """Mask of what each gate keeps (residual dimensions, heads or channels), (size,), bool."""
    model: OpenedModel
    adapters: AdapterPlan
    tensors: Tensors
    """Values of LoRA."""

    @staticmethod
    def of(site: Site, header: Header, tensors: Tensors, embedding: Tensor) -> "SmallerModel":
        """Build the smaller model."""
        job = site.settings.of(SftPSettings)
        plan = site.model.plan
        gates = ResidualGates(plan)
        # The input of the generator: the embedding, then the budget.
        conditioning = torch.cat([embedding, budget_input(job, own_pruning_ratio(site, header))])
        logits = gate_logits(plan, shape_of(site.settings), tensors, conditioning)
        # A constant shift of the logits: gates begin open.
        biased = {gate: values + BIAS for gate, values in logits.items()}
        # With masks "budget" the most likely gates within the budget, otherwise each by its own.
        chosen = gates.chosen(biased, own_target(site, header) if job.masks == "budget" else None)
        structure = gates.structure(chosen, norm_of_read=job.norm == "read")
        adapters = cut_adapter_plan(lora_plan(plan, site.settings), plan, structure)
        smaller = OpenedModel(site.model.directory, structure)
        # LoRA is cut to the rows and columns that remain.
        return SmallerModel(
            chosen, smaller, adapters, cut_trained(_lora_of(tensors), plan, structure)
        )

    @property
    def edits(self) -> Edits:
        """Edits that merge LoRA into the smaller model."""
        return merged(self.adapters, self.tensors)

    def validated(self, site: Site, header: Header) -> float | None:
        """Return its perplexity on own held-out text, which is not sent; None without such text."""
        # The owner may look at the result of a round; nothing is sent.
        number = site.settings.of(SftPSettings).validation_samples
        if not number:
            return None
        try:
            samples = validation_samples(
                site.settings, site.node, site.model.encode, header.client, number
            )
        # The perplexity is only informative, so a missing one must not cost a round.
        except EspalierError as error:
            logging.getLogger("espalier").warning("no validation: %s", error)
            return None
        return perplexity(
            mean_losses(BlockStream(self.model, site.computing), {"": samples}, self.edits)[""]
        )

    def loaded(self, site: Site) -> Any:
        """Return the whole model in memory, with LoRA."""
        settings = site.settings
        if settings.training.base == "nf4":
            # The shapes after the cut need not be multiples of the NF4 block size.
            dtype = "bfloat16" if site.computing.dtype == torch.bfloat16 else "float32"
            training = settings.training.model_copy(update={"base": dtype})
            settings = settings.model_copy(update={"training": training})
        adapted = site.load(self.model, site.computing, settings, self.adapters, None)
        adapted.set(self.tensors)
        return adapted.whole


def _lora_of(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    lora = {
        key: {name: value for name, value in block.items() if ".lora_" in name}
        for key, block in tensors.items()
    }
    return {key: block for key, block in lora.items() if block}


def own_pruning_ratio(site: Site, header: Header | None) -> float:
    """Return this client's pruning ratio: its owner's, or else the run's.

    Without a header, the ratio of an individual simulated client is not used.
    """
    job = site.settings.of(SftPSettings)
    # The owner's ratio has precedence over the run's.
    if site.node.pruning_ratio:
        return site.node.pruning_ratio
    if header is not None and site.node.simulated:
        return job.pruning_ratio_of_client(header.client)
    return job.pruning_ratio


def own_target(site: Site, header: Header | None) -> int:
    """Return the maximum number of block weights in this client's model.

    Raises InputError if the pruning ratio is too large; a ratio that the site's owner chose is not
    sent to the server.
    """
    scope = site.settings.of(SftPSettings).ratio_of
    try:
        return ResidualGates(site.model.plan).target(own_pruning_ratio(site, header), scope)
    except EspalierError as error:
        if site.node.pruning_ratio:
            # The server gets a text without the owner's number.
            raise InputError(f"pruning-ratio in --node-config: {error}", OUTWARD) from None
        raise InputError(f"{site.settings.method}.{error}") from None


OUTWARD = (
    "pruning-ratio in --node-config: this site's model cannot lose what its owner chose; the node's"
    " log says more"
)


OWN = "own"
"""Key of the tensors that a client never sends: its embedding and AdamW's moments for it."""


def require_ready(site: Site) -> None:
    """Raise InputError before enrolment if the owner's pruning ratio is impossible here.

    The text that is sent to the server does not contain the ratio.
    """
    if site.node.pruning_ratio:
        own_target(site, None)


def train(site: Site, request: MessageBody) -> MessageBody:
    """Train the round's generator and LoRA, and reply with the first part, once per round."""
    order = validate(Order, request.fields)

    def work(state: PrivateState) -> TuningReport:
        require_own_data(site, request.header)
        return _train(site, state, request, order.rank_limit)

    # Pushed parts of the generator and LoRA are inputs of the answer.
    return answer_once(site, request, work, lambda _: start_hashes(site, request))


def _first(site: Site) -> Tensors:
    return first_shared(site.model.plan, site.settings)


def _train(site: Site, state: PrivateState, request: MessageBody, rank_limit: int) -> TuningReport:
    started = time.monotonic()
    header = request.header
    settings = site.settings
    plan = trained(site.model.plan, settings, rank_limit)
    steps = settings.training.steps
    # Initial values of the generator and LoRA follow from the seed.
    start = round_adapters.begins_with(site, plan, start_blobs(site, request), _first)
    training = _training(site, state, header)
    first_step = (header.server_round - 1) * settings.training.steps
    adapter_averaging.require_enough(site, training, range(first_step, first_step + steps))
    # From before this round, so that a repeated round begins with the same embedding.
    stored = _conditioning(state, header)
    moments = {}
    # Only the embedding's moments continue; those of shared tensors are reset in every round.
    if "step" in stored:
        moments[EMBEDDING] = {name: stored[name] for name in ("exp_avg", "exp_avg_sq", "step")}
    with kernel_errors():
        tensors, outcome = training.masked(start, first_step, steps, moments)
    adapter_averaging.require_enough(site, training, outcome.weighed)
    # 1. Private: embedding and moments stay here.
    kept = {EMBEDDING: training.embedding, **dict(outcome.moments.get(EMBEDDING, {}))}
    client_state.keep(state, client_state.CONDITIONING, header.server_round, {OWN: kept})
    mine = SmallerModel.of(site, header, tensors, training.embedding)
    # 2. The owner's record of the masks.
    mask_history.note_round(
        state, header.server_round, training.spent, mine.validated(site, header)
    )
    mask_history.note_masks(state, mine.chosen)
    seconds = time.monotonic() - started
    # 3. What is sent: generator and LoRA.
    hashes = round_adapters.keep_blobs(site, state, header.server_round, tensors, start, rank_limit)
    return TuningReport(
        **adapter_averaging.report_of(site, seconds, training, outcome, rank_limit, hashes)
    )


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Write the client's smaller model, as the rounds left it, if its owner wants it.

    A client that took part in no round fits its embedding first.
    """
    header = request.header
    job = site.settings.of(SftPSettings)
    order = validate(BaselineOrder, request.fields)

    def make(state: PrivateState) -> dict[str, Any]:
        # A repeated request must not fit the embedding again.
        if order.fits and EMBEDDING not in _conditioning(state, result_header(header)):
            _fit(site, state, header)
        if job.keep_models and (target := own_folder(site, state)) is not None:
            mine = SmallerModel.of(site, header, *_own(site, state, header))
            write_own(site, mine.model, mine.edits, target)
        return {}

    return make_local_baseline(site, request, make)


def _fit(site: Site, state: PrivateState, header: Header) -> None:
    """Fit the embedding of a client that took part in no round; it stays here."""
    require_own_data(site, header)
    training = _training(site, state, header)
    steps = site.settings.of(SftPSettings).late_steps
    adapter_averaging.require_enough(site, training, range(steps))
    with kernel_errors():
        training.fitted(_pushed(site, header), steps)
    kept = {OWN: {EMBEDDING: training.embedding}}
    client_state.keep(state, client_state.CONDITIONING, header.server_round, kept)
    mask_history.note_fit(state, training.spent)


def _conditioning(state: PrivateState, header: Header) -> dict[str, Tensor]:
    """Return the embedding and its moments from earlier rounds, or {} if there are none."""
    return client_state.before(state, client_state.CONDITIONING, header.server_round).get(OWN, {})


def _own(site: Site, state: PrivateState, header: Header) -> tuple[Tensors, Tensor]:
    """Return the final generator and LoRA, and the client's embedding after the last round.

    Raises StateLost without the embedding: with another one the model would belong to no client.
    """
    # Without personal embeddings all clients have the same one.
    job = site.settings.of(SftPSettings)
    needed = job.conditioned and job.has_local_baseline
    if needed and EMBEDDING not in _conditioning(state, result_header(header)):
        raise StateLost(
            f"{header.kind}: this client no longer has its embedding, without which it has no model"
            " of its own"
        )
    return _pushed(site, header), own_embedding(site, state, result_header(header))


def _pushed(site: Site, header: Header) -> Tensors:
    """Return the final generator and LoRA."""
    plan = trained(site.model.plan, site.settings)
    blobs = pushed_blobs(site, result_header(header), len(parts(plan, site.settings)))
    return round_adapters.begins_with(site, plan, blobs, _first)


def _training(site: Site, state: PrivateState, header: Header) -> MaskedTraining:
    """Return this client's training, which starts from its own embedding."""
    settings = site.settings
    job = settings.of(SftPSettings)
    client = header.client
    names = [
        flat_name(key, name)
        for key, shapes in shape_of(settings).shapes(site.model.plan).items()
        for name in shapes
    ]
    # AdamW has separate settings for the generator and the embedding.
    generator = [*names, EMBEDDING] if job.conditioned else names
    return MaskedTraining(
        model=site.model,
        computing=site.computing,
        settings=settings,
        adapters=lora_plan(site.model.plan, settings),
        sequences=client_sequences(settings, site.node, site.model, client),
        seed=derive_seed(settings.seed, "training", client=client),
        cache_folder=round_adapters.cache_of(site),
        load=site.load,
        groups=[of_generator(generator, settings)],
        embedding=own_embedding(site, state, header),
        target=own_target(site, header),
        budget=budget_input(job, own_pruning_ratio(site, header)),
    )


def own_embedding(site: Site, state: PrivateState, header: Header) -> Tensor:
    """Return the client's embedding from earlier rounds, or else that of the seed.

    All clients share a constant if embeddings are not personal.
    """
    kept = _conditioning(state, header)
    if EMBEDDING in kept:
        return kept[EMBEDDING]
    # None for all clients in common.
    whose = header.client if site.settings.of(SftPSettings).conditioned else None
    return first_embedding(site.settings, whose)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the client's own smaller model on evaluation text or items.

    With ``own_text`` it is also compared with the dense model on the client's own held-out data.
    """
    header = request.header
    settings = site.settings
    state = site.state(request.header)
    inputs = _own(site, state, header)
    # Before the evaluation counts as one.
    require_many_at_a_site(site, request)

    def evaluation() -> Losses:
        # The model rests on private state and on what the server pushed, so its errors count.
        mine = SmallerModel.of(site, header, *inputs)
        mask_history.note_masks(state, mine.chosen)
        if settings.task.name == TEXT:
            model = (mine.model, mine.edits)
            return prepare_evaluation(site, request, model, lambda: model)()

        def model_of(name: str) -> Any:
            if name != "dense":
                return mine.loaded(site)
            return site.load(
                site.model, site.computing, settings, AdapterPlan({}), round_adapters.cache_of(site)
            ).whole

        return prepare_task_evaluation(site, request, model_of)()

    return evaluation
