"""Numbers of rounds with which methods send as many bytes as a reference."""

from collections.abc import Mapping
from typing import Any

from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import parse
from server_app.estimate.messages.traffic import RunTraffic, unread_tests

MOST_ROUNDS = 200


def rounds_within(
    settings: Mapping[str, Any], reference: Mapping[str, Any], model: OpenedModel
) -> int:
    """Return the most rounds whose bytes do not exceed those of a reference run; at least 1.

    Bytes are those of the estimate, of all clients in both directions. More than ``MOST_ROUNDS``
    rounds are not tried.

    Parameters
    ----------
    settings, reference : flat settings; ``federation.rounds`` of ``settings`` is not used
    """
    limit = _bytes(reference, model)
    fits, too_many = 1, MOST_ROUNDS + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _bytes({**settings, "federation.rounds": middle}, model) <= limit:
            fits = middle
        else:
            too_many = middle
    return fits


def _bytes(settings: Mapping[str, Any], model: OpenedModel) -> int:
    run = parse(dict(settings))
    return RunTraffic(run, model, unread_tests(run, model)).total().num_bytes
