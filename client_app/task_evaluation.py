"""Evaluation of tuned models on a task's items: losses and accuracies leave the client, items do not."""

import time
from collections.abc import Callable

from client_app.evaluation import require_own_text
from client_app.site import Site, reply_to
from espalier.corpora.client_items import held_out_items
from espalier.corpora.tasks.scored_items import ScoredItems, from_arrays
from espalier.evaluation.scores import score
from espalier.settings.task import TEXT
from espalier.training.adapted import AdaptedModel
from espalier.wire.adapters import Tensors
from espalier.wire.evaluation import OWN_LOSS_DIGITS, OWN_LOSS_LIMIT, TEST_BLOB, Losses
from espalier.wire.messages import Header, Letter
from espalier.wire.payload import unpack_tensors


def require_own_data(site: Site, header: Header) -> None:
    """If a client's own text or items will be evaluated on, find out before the work whether there are enough of them."""
    if site.settings.task.name == TEXT:
        require_own_text(site, header)
    elif site.settings.evaluation.own_text and header.server_round == 1:
        _own_items(site, header)


def _own_items(site: Site, header: Header) -> ScoredItems:
    classes = site.model.family.kind == "encoder"
    return held_out_items(site.settings, site.node, site.model.tokenizer, header.rank, classes)


def answer_on_task(
    site: Site, request: Letter, adapted: AdaptedModel, alone: Tensors, federated: Callable[[], Tensors]
) -> Letter:
    """Scores of what the client trained alone on public items that were sent along, and losses of all models on its own.

    Parameters
    ----------
    adapted : the base model, with adapters that change nothing
    alone : what the client trained by itself
    federated : the federated adapters; asked for only if they are to be evaluated
    """
    started, size = time.monotonic(), site.settings.training.batch_size
    classes, device = site.model.family.kind == "encoder", site.computing.device
    report = Losses(losses=[], own_losses=[], own_windows=0, seconds=0.0)
    base = adapted.values()
    if TEST_BLOB in request.blobs:
        items = from_arrays(unpack_tensors(request.blobs[TEST_BLOB]))
        adapted.set(alone)
        scores = score(adapted.whole, items, classes, size, device)
        report.test_scores = [scores[metric] for metric in request.scalars["test_metrics"]]
    if request.scalars["own_text"]:
        own = _own_items(site, request.header)
        for tensors in (base, alone, federated()):  # in the order of OWN_TEXT_MODELS
            adapted.set(tensors)
            loss = score(adapted.whole, own, classes, size, device, OWN_LOSS_LIMIT)["loss"]
            report.own_losses.append(round(loss, OWN_LOSS_DIGITS))
        report.own_windows = len(own)
    report.seconds = time.monotonic() - started
    return reply_to(request, report)
