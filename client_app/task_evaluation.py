"""Evaluation of tuned models on a task's items: losses and accuracies leave the client, items do not."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from client_app.evaluation import require_many_at_a_site, require_own_text
from client_app.site import Site, reply_to
from espalier.corpora.client_items import held_out_items
from espalier.corpora.tasks.scored_items import ScoredItems, from_arrays
from espalier.evaluation.scores import score
from espalier.settings.mistakes import Mistake
from espalier.settings.task import TEXT
from espalier.wire.evaluation import LOSS_DIGITS, OWN_LOSS_LIMIT, OWN_TEXT_MODELS, TEST_BLOB, Losses
from espalier.wire.messages import Header, Letter
from espalier.wire.payload import unpack_tensors


def require_own_data(site: Site, header: Header) -> None:
    """If a client's own text or items will be evaluated on, find out before the work whether there are enough of them."""
    if site.settings.task.name == TEXT:
        require_own_text(site, header)
    elif site.settings.evaluation.own_text and header.server_round == 1:
        _own_items(site, header)


def _own_items(site: Site, header: Header) -> ScoredItems:
    """The held-out items; how many are cut is told in this node's log alone, as it is a count of single items."""
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
    """Refuse public items that are longer than this site's model takes; its config.json may be another than the server's."""
    longest = max(len(one.token_ids) for one in items.requests)
    positions = site.model.num_positions
    if positions is not None and longest - (not classes) > positions:
        raise Mistake(
            f"evaluate: a test item has {longest} tokens, and the model at this site has"
            f" {positions} positions ({site.model.positions_key} in its config.json); the site"
            " needs the config.json of the server's model"
        )


def answer_on_task(site: Site, request: Letter, model_of: Callable[[str], Any]) -> Letter:
    """Scores of the client's own result on public items that were sent along, and losses of all models on its own.

    Parameters
    ----------
    model_of : gives the whole model, in evaluation mode, of a name of ``OWN_TEXT_MODELS``; asked for those that are evaluated,
        one after the other
    """
    started = time.monotonic()
    size = site.settings.training.batch_size
    require_many_at_a_site(site, request)
    classes = site.model.family.kind == "encoder"
    device = site.computing.device
    report = Losses(losses=[], own_losses=[], seconds=0.0)
    if TEST_BLOB in request.blobs:
        items = from_arrays(unpack_tensors(request.blobs[TEST_BLOB]))
        _require_that_model_takes(site, items, classes)
        scores = score(model_of("local_only"), items, classes, size, device)
        if not all(map(math.isfinite, scores.values())):
            raise Mistake(
                "evaluate: the scores of this client's model on the public test items are NaN or"
                " infinite; set dtype to 'float32', or lower training.learning-rate"
            )
        report.test_scores = [
            round(scores[metric], LOSS_DIGITS) for metric in request.scalars["test_metrics"]
        ]
    if request.scalars["own_text"]:
        own = _own_items(site, request.header)
        for name in OWN_TEXT_MODELS:
            loss = score(model_of(name), own, classes, size, device, OWN_LOSS_LIMIT)["loss"]
            report.own_losses.append(round(loss, LOSS_DIGITS))
    report.seconds = time.monotonic() - started
    return reply_to(request, report)
