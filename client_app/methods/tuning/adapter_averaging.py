"""Adapter averaging at a client, the same for every method that averages adapters.

A client trains the round's adapters on its own text. Adapters are sent; text, gradients and
optimizer state never leave. The client state keeps what later messages need: the trained adapters,
for further parts, and the quantization errors of their payload.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol

from safetensors.torch import load, save
from torch import Tensor

from client_app.methods.tuning.round_adapters import (
    begins_with,
    cache_of,
    initial_tensors,
    keep_blobs,
)
from client_app.protocol.answer_once import answer_once
from client_app.protocol.errors import kernel_errors
from client_app.protocol.evaluation import (
    Evaluation,
    prepare_evaluation,
    prepare_task_evaluation,
    require_own_data,
)
from client_app.protocol.local_baseline import make_local_baseline, stored_local_baseline
from client_app.protocol.push import pushed_blobs, result_header, start_blobs, start_hashes
from client_app.site import Site
from espalier.data.data_protection import require_tokens
from espalier.hf.stream.edits import Edits
from espalier.hf.whole.adapters import merged
from espalier.hf.whole.folded_updates import joined_plan, joined_tensors, padded
from espalier.hf.whole.inner_matrices import plain_tensors
from espalier.messages.local_baseline import BaselineOrder
from espalier.messages.message import Header, MessageBody, validate
from espalier.methods.tuning.adapters.contract import TuningReport
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.tensors import (
    before_round,
    of_all_rounds,
    of_round,
    parts,
    trained,
)
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT
from espalier.storage.client_state import PrivateState
from espalier.training.adapted_model import AdaptedModel
from espalier.training.adapter_training import AdapterTraining
from espalier.training.loop import Trained
from espalier.training.sequences import client_sequences

FIRST_ORDER = "first-order"
"""Name of the document with the first order of the run."""


@dataclass(frozen=True)
class Additions:
    """Additions of a method to the model (next to the trained adapters) and to the loss."""

    plan: AdapterPlan | None = None
    """Adapters of other blocks, which are not trained."""
    values: Tensors = field(default_factory=dict)
    """Values of the adapters of ``plan``."""
    rests_on: Mapping[str, str] = field(default_factory=dict)
    """Inputs of an answer that come from these additions, by name."""
    penalty: Callable[[AdapterPlan, Tensors], Tensor] | None = None
    """Penalty on the trained tensors that replaces ``training.proximal``."""


NOTHING = Additions()


class RankPruning(Protocol):
    """Choice of the rank with which a client goes on after a round."""

    @property
    def penalty(self) -> Callable[[Tensors], Tensor] | None:
        """Term of the training loss as a function of the trained tensors; None if there is none."""

    def rank_after(self, before: Tensors, after: Tensors) -> int:
        """Return the rank for the next round from the tensors before and after training."""


RankPruningOf = Callable[[RunSettings, AdapterPlan, int], RankPruning | None]
"""Function of settings, adapters and their rank; its result is None if the rank stays."""


def train(
    site: Site,
    request: MessageBody,
    additions: Additions = NOTHING,
    rank_pruning: RankPruningOf = lambda *_: None,
) -> MessageBody:
    """Train the round's adapters and reply with the first part. Each round is answered once."""
    header = request.header
    # Fields of the method's own contract, which may be more than ``Order``.
    order: Any = validate(site.contract.down.fields, request.fields)
    adapters = trained(site.model.plan, site.settings, order.rank_limit)

    def tune(state: PrivateState) -> TuningReport:
        # Enough data for everything that the run evaluates, before the first round trains.
        require_own_data(site, header)
        pruning = rank_pruning(site.settings, adapters, order.rank_limit)
        report = _train(site, state, request, adapters, order.rank_limit, additions, pruning)
        # The first order has the rank with which the client began, for the local baseline.
        if state.load_lasting(FIRST_ORDER) is None:
            state.save_lasting(FIRST_ORDER, order.model_dump())
        return report

    # An order with other pushed adapters is another request.
    return answer_once(
        site, request, tune, lambda _: {**additions.rests_on, **start_hashes(site, request)}
    )


def require_enough(site: Site, training: AdapterTraining, steps: Iterable[int]) -> None:
    """Raise InputError if these steps use fewer tokens or groups than the site policy requires."""
    tokens = training.rests_on(steps, site.node.fewest_tokens())
    remedy = (
        "give the site more data, raise training.steps, training.batch-size or"
        " training.accumulation"
    )
    require_tokens(site.node, tokens, remedy)
    site.require_groups_of(training.used(steps), remedy)


def _train(
    site: Site,
    state: PrivateState,
    request: MessageBody,
    adapters: AdapterPlan,
    rank_limit: int,
    additions: Additions,
    pruning: RankPruning | None,
) -> TuningReport:
    """Train, store all blobs, and return the report."""
    started = time.monotonic()
    server_round = request.header.server_round
    start = begins_with(site, adapters, start_blobs(site, request), server_round=server_round)
    sent = of_round(adapters, site.settings, server_round)
    # The schedule continues over the rounds.
    steps = site.settings.training.steps
    first_step = (server_round - 1) * steps
    penalty = None if pruning is None else pruning.penalty
    training = _training(site, sent, additions, request.header.client, first_step, penalty)
    with kernel_errors():
        # 1. Train.
        tensors, outcome = training.run(start, first_step, steps)
        # The check is repeated after training: skipped steps contribute no tokens.
        require_enough(site, training, outcome.weighed)
        # 2. Lower the rank, if the tail became weaker.
        rank = rank_limit if pruning is None else pruning.rank_after(start, tensors)
    seconds = time.monotonic() - started
    # 3. Store what is sent, rounded for the wire.
    hashes = keep_blobs(site, state, server_round, tensors, start, rank)
    return TuningReport(**report_of(site, seconds, training, outcome, rank, hashes))


def report_of(
    site: Site,
    seconds: float,
    training: AdapterTraining,
    outcome: Trained,
    rank: int,
    hashes: list[str],
) -> dict[str, Any]:
    """Return the fields of ``TuningReport`` for a round whose work took ``seconds``."""
    weighed = site.settings.federation.weighs_samples
    return {
        "seconds": seconds,
        "samples": training.num_sequences if weighed else 0,
        "skipped_steps": outcome.skipped_steps,
        "rank": rank,
        "blob_sha256": hashes,
    }


def _training(
    site: Site,
    adapters: AdapterPlan,
    additions: Additions,
    client: int,
    first_step: int = 0,
    penalty: Callable[[Tensors], Tensor] | None = None,
) -> AdapterTraining:
    """Return a client's training; refuse a first round of fewer tokens than the policy requires."""
    settings = site.settings
    # A method's own penalty replaces the proximal term.
    if additions.penalty is not None:
        settings = settings.without_proximal()
        penalty = partial(additions.penalty, adapters)
    training = AdapterTraining(
        model=site.model,
        computing=site.computing,
        settings=settings,
        adapters=adapters.joined(additions.plan),
        frozen=additions.values,
        penalty=penalty,
        sequences=client_sequences(settings, site.node, site.model, client),
        seed=derive_seed(settings.seed, "training", client=client),
        cache_folder=cache_of(site),
        load=site.load,
    )
    # Before the work: data that does not suffice is never trained on.
    require_enough(site, training, range(first_step, first_step + settings.training.steps))
    return training


def local_baseline(site: Site, request: MessageBody, additions: Additions = NOTHING) -> MessageBody:
    """Compute the local baseline: adapters with the rank of this client's first order.

    They stay at this client.
    """

    def make(state: PrivateState) -> dict[str, Any]:
        rank_limit = validate(BaselineOrder, request.fields).rank_limit
        # Without an order the limit is that of the settings.
        limit = rank_limit or site.settings.of(AdapterAveraging).rank_limit_of(
            request.header.client, site.settings.lora
        )
        # The first order has the rank from before any self-pruning.
        order = state.load_lasting(FIRST_ORDER) or {"rank_limit": limit}
        plan = trained(site.model.plan, site.settings, order["rank_limit"])
        adapters = of_all_rounds(plan, site.settings)
        blobs = _train_local_baseline(site, state, request.header, adapters, additions)
        return {"rank_limit": order["rank_limit"], "blobs": blobs}

    return make_local_baseline(site, request, make)


def _train_local_baseline(
    site: Site, state: PrivateState, header: Header, adapters: AdapterPlan, additions: Additions
) -> dict[str, str]:
    """Train for as many steps as in all rounds, and return the SHA-256 of each stored blob."""
    training = _training(site, adapters, additions, header.client)
    store = state.blobs(header.server_round)
    with kernel_errors():
        tensors, outcome = training.run(
            initial_tensors(site, adapters, site.settings.seed), 0, training.total_steps
        )
        require_enough(site, training, outcome.weighed)
    # Plain adapters, also for methods that train others.
    return {
        key: store.put(save(plain_tensors(adapters, key, block))) for key, block in tensors.items()
    }


def evaluate(site: Site, request: MessageBody, additions: Additions = NOTHING) -> Evaluation:
    """Prepare to evaluate the local baseline on evaluation text, and all models on own text.

    The local baseline has the client's own rank. The federated adapters have the full rank.
    """
    header = request.header
    plan = trained(site.model.plan, site.settings)
    # The baseline was made with the client's own rank.
    made = stored_local_baseline(site, request.header)
    adapters = trained(site.model.plan, site.settings, made["rank_limit"])
    store = site.state(header).blobs(header.server_round)
    alone = {key: load(store.get(blob)) for key, blob in made["blobs"].items()}

    # Folded updates make the result's rank larger than the trained one.
    result = result_plan(plan, site.settings)

    def federated() -> Tensors:
        # The result is pushed as if for one more round.
        end = result_header(header)
        num_parts = len(parts(plan, site.settings, end.server_round))
        blobs = pushed_blobs(site, end, num_parts)
        tensors = begins_with(site, plan, blobs, server_round=end.server_round)
        plain = {key: plain_tensors(plan, key, block) for key, block in tensors.items()}
        return {key: joined_tensors(result, key, block) for key, block in plain.items()}

    if site.settings.task.name == TEXT:
        local_edits = _edits(adapters, alone, additions)
        before = _edits(result, {}, additions)
        return prepare_evaluation(
            site, request, local_edits, lambda: _edits(result, federated(), additions), before
        )
    # Pushed adapters are needed only for the comparison on own text.
    pushed: Tensors = federated() if request.fields["own_text"] else {}

    @cache
    def loaded() -> tuple[AdaptedModel, Tensors]:
        """Return the model, and the values with which it is the dense model."""
        adapted = site.load(
            site.model,
            site.computing,
            site.settings,
            result.joined(additions.plan),
            cache_of(site),
        )
        adapted.set(additions.values)
        return adapted, adapted.values()

    def model_of(name: str) -> Any:
        adapted, base = loaded()
        tensors = {"dense": base, "local_baseline": padded(result, alone), "federated": pushed}
        # One model in memory; only its adapters change between evaluations.
        adapted.set(tensors[name])
        return adapted.whole

    return prepare_task_evaluation(site, request, model_of)


def result_plan(whole: AdapterPlan, settings: RunSettings) -> AdapterPlan:
    """Return the plan of the run's result, which includes updates that were folded in."""
    folded = before_round(whole, settings, settings.federation.rounds + 1).folded
    return joined_plan(replace(whole, bases=""), folded)


def _edits(adapters: AdapterPlan, tensors: Tensors, additions: Additions) -> Edits:
    """Return the edits that merge the adapters and ``additions`` into the blocks with tensors."""
    plan = adapters.joined(additions.plan)
    return merged(plan, {**tensors, **additions.values})
