"""Orders that a client accepts in a round, after successful and after failed work.

The same promise of each method is tested in promises.py.
"""

from pathlib import Path
from typing import Any

import pytest

from client_app.protocol.answer_once import answer_once
from client_app.site import Site
from espalier.errors import EspalierError, InputError, StateLost
from espalier.messages.contract import Contract, Side
from espalier.messages.message import UNREAD, MessageBody, NoFields
from espalier.messages.parts import Report
from espalier.settings.node import parse_node
from espalier.storage.client_state import PrivateState


@pytest.fixture
def site(tmp_path: Path) -> Site:
    node = parse_node({"partition-id": 0, "state-dir": str(tmp_path)}, simulated=True)
    found = Site({}, node)
    vars(found)["contract"] = Contract("train", "fedprllm", Side(NoFields), Side(Report), "")
    return found


def order(number: int, **fields: Any) -> MessageBody:
    header = UNREAD.model_copy(
        update={"kind": "train", "method": "fedprllm", "server_round": number, "client": 0}
    )
    return MessageBody(header, fields)


def works(_: PrivateState) -> Report:
    return Report(seconds=1.0, blob_sha256=[])


def fails(_: PrivateState) -> Report:
    raise InputError("no finite score")


def test_failed_order_uses_up_its_round(site: Site) -> None:
    """A failed order must not allow another order of the same round.

    A server could otherwise try orders until one fails in a way that depends on a client's text.
    """
    with pytest.raises(EspalierError, match="no finite score"):
        answer_once(site, order(1, layers=[0]), fails)
    with pytest.raises(
        EspalierError, match="this client answered another request of round 1; start a new run"
    ):
        answer_once(site, order(1, layers=[1]), works)
    assert answer_once(site, order(1, layers=[0]), works).fields["seconds"] == 1.0
    answer_once(site, order(2, layers=[1]), works)


def test_unstarted_order_leaves_its_round_open(site: Site) -> None:
    def lost(_: PrivateState) -> None:
        raise StateLost("bring it again")

    with pytest.raises(StateLost):
        answer_once(site, order(1, layers=[0]), fails, require_ready=lost)
    answer_once(site, order(1, layers=[1]), works)
