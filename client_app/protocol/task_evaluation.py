"""Evaluation of tuned models on task items: losses and accuracies are sent, items never are."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from client_app.protocol.evaluation import Evaluation, require_many_at_a_site, require_own_text
from client_app.site import Site
from espalier.data.client_items import held_out_items
from espalier.data.tasks.scored_items import ScoredItems, from_arrays
from espalier.errors import InputError
from espalier.evaluation.scores import score
from espalier.messages.evaluation import (
    LOSS_DIGITS,
    OWN_LOSS_LIMIT,
    OWN_TEXT_MODELS,
    TEST_BLOB,
    Losses,
)
from espalier.messages.message import Header, MessageBody
from espalier.messages.tensor_blobs import unpack_tensors
from espalier.settings.task import TEXT


def require_own_data(site: Site, header: Header) -> None:
    """Check before the first round that there is enough own data, if it will be evaluated."""
    if site.settings.task.name == TEXT:
        require_own_text(site, header)
    elif site.settings.evaluation.own_text and header.server_round == 1:
        _own_items(site, header)


def _own_items(site: Site, header: Header) -> ScoredItems:
    """Return the held-out items.

    The number of truncated items is written only to this node's log, because it depends on single
    items.
    """
    classes = site.model.family.kind == "encoder"
    own = held_out_items(
        site.settings,
        site.node,
        site.model.tokenizer,
        header.client,
        classes,
        site.model.num_positions,
    )
    if own.cut:
        logging.getLogger("espalier").warning(
            "%d of %d own test items are too long and were cut", len(own.cut), len(own)
        )
    return own


def _require_that_model_takes(site: Site, items: ScoredItems, classes: bool) -> None:
    """Raise InputError if a public item is longer than the site's model accepts.

    The site's ``config.json`` may differ from the server's.
    """
    longest = max(len(one.token_ids) for one in items.requests)
    positions = site.model.num_positions
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

    Parameters
    ----------
    model_of : function that returns the whole model, in evaluation mode, for a name of
        ``OWN_TEXT_MODELS``. It is called one by one for the models that are evaluated.
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
        report = Losses(losses=[], own_losses=[], seconds=0.0)
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
        if request.fields["own_text"]:
            own = _own_items(site, request.header)
            for name in OWN_TEXT_MODELS:
                loss = score(model_of(name), own, classes, size, device, OWN_LOSS_LIMIT)["loss"]
                report.own_losses.append(round(loss, LOSS_DIGITS))
        report.seconds = time.monotonic() - started
        return report

    return evaluation
