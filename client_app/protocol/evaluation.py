"""Evaluation at a client, the same for every method: only losses leave it, no text or logits.

A method prepares its evaluation from stored results. Errors of this step say only what is missing,
and the evaluation does not count. It counts from its first look at private text.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from client_app.protocol.answer_once import answer_once
from client_app.site import Site
from espalier.data.client_items import held_out_items
from espalier.data.client_text import held_out_samples
from espalier.data.tasks.scored_items import ScoredItems, from_arrays
from espalier.errors import InputError
from espalier.evaluation.perplexity import mean_losses
from espalier.evaluation.scores import score
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, not_finite
from espalier.hf.stream.edits import Edits, dense
from espalier.messages.evaluation import (
    LOSS_DIGITS,
    OWN_LOSS_LIMIT,
    OWN_TEXT_MODELS,
    SAMPLES_BLOB,
    TEST_BLOB,
    Losses,
    Texts,
    require_many,
)
from espalier.messages.message import Header, MessageBody, validate
from espalier.messages.tensor_blobs import unpack_tensors
from espalier.settings.tables.task import TEXT
from espalier.storage.client_state import PrivateState


def require_own_text(site: Site, header: Header) -> None:
    """Check before the first round that there is enough held-out text, if it will be evaluated."""
    # Only once: the text does not change during a run.
    if site.settings.evaluation.own_text and header.server_round == 1:
        held_out_samples(site.settings, site.node, site.model.encode, header.client)


def require_many_at_a_site(site: Site, request: MessageBody) -> None:
    """Raise InputError if a real site gets too few or too many evaluation texts or items.

    A mean loss over few predictions would reveal how the local model continues a single sentence.
    The maximum number of sequences is set by the site policy (``max-samples``).
    """
    if site.node.simulated:
        return
    texts = validate(Texts, request.fields)
    max_samples = site.node.most("max_samples")
    require_many(texts)
    if max_samples is not None and sum(texts.num_samples) > max_samples:
        raise InputError(
            f"max-samples = {max_samples}: the public texts of evaluation.texts have"
            f" {sum(texts.num_samples)} samples; lower evaluation.max-samples, or have the site's"
            " owner change --node-config"
        )


Evaluation = Callable[[], Losses]
"""Prepared evaluation, which reads private text when it is called."""

Evaluated = Edits | OpenedModel | tuple[OpenedModel, Edits]
"""Model to evaluate: edits of the base model, a smaller model, or edits of a smaller model."""


def evaluate_once(site: Site, request: MessageBody, evaluation: Evaluation) -> MessageBody:
    """Answer an evaluation, which is answered once in a run."""
    number = request.header.server_round

    def results(state: PrivateState) -> Mapping[str, object]:
        """Return the hashes of the results that are evaluated."""
        # The stored answer itself is not an input of it.
        documents = state.documents(number)
        documents.pop(request.header.kind, None)
        # The final result is pushed as if for one more round.
        # The evaluation rests on everything that this round stored and the server pushed.
        return {
            "own": documents,
            "pushed": state.documents(number + 1),
            "model": state.model_documents(),
        }

    return answer_once(site, request, lambda _: evaluation(), results)


def prepare_evaluation(
    site: Site,
    request: MessageBody,
    baseline: Evaluated,
    federated: Callable[[], Evaluated],
    before: Evaluated = dense,
) -> Evaluation:
    """Prepare to evaluate the local result on evaluation text, and all models on held-out text.

    ``baseline`` is the local baseline, and ``federated`` returns the federated result, if it is
    evaluated. ``before`` is the model that clients began with.
    """
    require_many_at_a_site(site, request)
    texts: dict[str, torch.Tensor] = {}
    if SAMPLES_BLOB in request.blobs:
        arrays = unpack_tensors(request.blobs[SAMPLES_BLOB])
        texts = {
            name: torch.from_numpy(arrays[name]).to(torch.int64) for name in request.fields["names"]
        }
    models: dict[str, Evaluated] = {}
    if request.fields["own_text"]:
        # Held-out text compares three models: before, alone, and together.
        models = {"dense": before, "local_baseline": baseline, "federated": federated()}

    def evaluation() -> Losses:
        started = time.monotonic()
        report = Losses(losses=[], own_losses=[], test_scores=[], seconds=0.0)
        if texts:
            # Rounded, because further digits tell about the data and not about the model.
            losses = _losses(site, texts, baseline).values()
            report.losses = [round(loss, LOSS_DIGITS) for loss in losses]
        if models:
            samples = held_out_samples(
                site.settings, site.node, site.model.encode, request.header.client
            )
            own_losses = [
                # A limit on each loss bounds what a single sequence can reveal.
                _losses(site, {"": samples}, models[name], OWN_LOSS_LIMIT)[""]
                for name in OWN_TEXT_MODELS
            ]
            report.own_losses = [round(loss, LOSS_DIGITS) for loss in own_losses]
        report.seconds = time.monotonic() - started
        return report

    return evaluation


def _losses(
    site: Site, texts: Mapping[str, torch.Tensor], model: Evaluated, limit: float | None = None
) -> dict[str, float]:
    if isinstance(model, tuple):
        opened, edits = model
    else:
        opened, edits = (model, dense) if isinstance(model, OpenedModel) else (site.model, model)
    stream = BlockStream(opened, site.computing)
    losses = mean_losses(stream, texts, edits, limit)
    # NaN would not pass the contract; the text says what to change.
    if not all(map(math.isfinite, losses.values())):
        raise not_finite(stream, "evaluate: the model of this client gives")
    return losses


def require_own_data(site: Site, header: Header) -> None:
    """Check before the first round that there is enough own data, if it will be evaluated."""
    if site.settings.task.name == TEXT:
        require_own_text(site, header)
    elif site.settings.evaluation.own_text and header.server_round == 1:
        _own_items(site, header)


def _own_items(site: Site, header: Header) -> ScoredItems:
    """Return the held-out items; only this node's log says how many were truncated."""
    items = held_out_items(site.settings, site.node, site.model, header.client)
    if items.cut:
        logging.getLogger("espalier").warning(
            "%d of %d own test items are too long and were cut", len(items.cut), len(items)
        )
    return items


def _require_that_model_takes(site: Site, items: ScoredItems, classes: bool) -> None:
    """Refuse a public item that is longer than the model by the site's ``config.json`` accepts."""
    longest = max(len(request.token_ids) for request in items.requests)
    positions = site.model.num_positions
    # An encoder reads every token; a decoder needs no position for the last one.
    if positions is not None and longest - (not classes) > positions:
        raise InputError(
            f"evaluate: a test item has {longest} tokens, and the model at this site has"
            f" {positions} positions ({site.model.positions_key} in its config.json); the site"
            " needs the config.json of the server's model"
        )


def prepare_task_evaluation(
    site: Site, request: MessageBody, model_of: Callable[[str], Any]
) -> Evaluation:
    """Prepare to score the client's local result on public items, and all models on its own items.

    ``model_of`` returns the whole model, in evaluation mode, for a name of ``OWN_TEXT_MODELS``. It
    is called one by one for the models that are evaluated.
    """
    require_many_at_a_site(site, request)
    classes = site.model.family.kind == "encoder"
    items = None
    if TEST_BLOB in request.blobs:
        items = from_arrays(unpack_tensors(request.blobs[TEST_BLOB]))
        _require_that_model_takes(site, items, classes)

    def evaluation() -> Losses:
        started = time.monotonic()
        size = site.settings.training.batch_size
        device = site.computing.device
        report = Losses(losses=[], own_losses=[], test_scores=[], seconds=0.0)
        # 1. Public items: only the client's own model.
        if items is not None:
            scores = score(model_of("local_baseline"), items, classes, size, device)
            if not all(map(math.isfinite, scores.values())):
                raise InputError(
                    "evaluate: the scores of this client's model on the public test items are NaN"
                    " or infinite; set dtype to 'float32', or lower training.learning-rate"
                )
            report.test_scores = [
                round(scores[metric], LOSS_DIGITS) for metric in request.fields["test_metrics"]
            ]
        # 2. Own items: all models, but only the loss leaves.
        if request.fields["own_text"]:
            scored = _own_items(site, request.header)
            for name in OWN_TEXT_MODELS:
                loss = score(model_of(name), scored, classes, size, device, OWN_LOSS_LIMIT)["loss"]
                report.own_losses.append(round(loss, LOSS_DIGITS))
        report.seconds = time.monotonic() - started
        return report

    return evaluation
