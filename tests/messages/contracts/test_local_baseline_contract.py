"""Contract of ``local_baseline``: the server sends a rank limit, the client returns only seconds.

The message exists in the last round of runs that store no result per client.
"""

import math
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import MessageBody, request_header
from espalier.messages.records import FLOWER_TYPES
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import parse
from tests.run_names import BY_HAND

PLAN = ModelPlan(
    tuple(BlockPlan(index, (LinearPlan("attn.q", f"{index}", (64, 64)),)) for index in range(4)), 4
)
TUNING = {"method": "fedpetuning", "federation.rounds": 3, "lora.rank": 8}
ITERATIVE = {"method": "fedprllm", "pruning.strategy": "iterative"}


def request(given: dict[str, Any], server_round: int, **fields: Any) -> MessageBody:
    header = request_header(given["method"], "local_baseline", server_round, lineage=BY_HAND)
    return MessageBody(header, {"rank_limit": 0, **fields})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TUNING, True),
        ({"method": "hetlora"}, True),
        (ITERATIVE, True),
        ({"method": "fedprllm"}, False),
        ({"method": "fedspallm"}, False),
    ],
)
def test_runs_in_which_there_is_such_a_message(given: dict[str, Any], expected: bool) -> None:
    settings = parse(given)
    assert settings.job.has_local_baseline == expected
    if not expected:
        with pytest.raises(EspalierError, match="compute no local baseline after their rounds"):
            contract_for(request(given, 1), lambda: PLAN, settings)


@pytest.mark.parametrize(("given", "last"), [(TUNING, 3), (ITERATIVE, 4)])
def test_it_is_for_the_last_round(given: dict[str, Any], last: int) -> None:
    settings = parse(given)
    contract = contract_for(request(given, last), lambda: PLAN, settings)
    check(request(given, last), contract.down)
    assert (contract.down.blobs, contract.up.blobs) == ({}, {})
    for server_round in (0, last - 1, last + 1):
        with pytest.raises(
            EspalierError,
            match=(
                f"local_baseline of round {server_round} does not exist,"
                f" the run ends with round {last}"
            ),
        ):
            contract_for(request(given, server_round), lambda: PLAN, settings)


@pytest.mark.parametrize(("given", "last", "largest"), [(TUNING, 3, 8), (ITERATIVE, 4, 0)])
def test_no_rank_is_asked_for_that_no_adapter_has(
    given: dict[str, Any], last: int, largest: int
) -> None:
    settings = parse(given)
    contract_for(request(given, last, rank_limit=largest), lambda: PLAN, settings)
    for rank, words in (
        (largest + 1, "rank_limit is above"),
        (-1, "BaselineOrder: missing, surplus or out of range: rank_limit"),
    ):
        with pytest.raises(EspalierError, match=words):
            contract_for(request(given, last, rank_limit=rank), lambda: PLAN, settings)


def test_nothing_but_seconds_comes_up() -> None:
    asked = request(TUNING, 3)
    contract = contract_for(asked, lambda: PLAN, parse(TUNING))
    check_reply(MessageBody(asked.header, {"seconds": 1.5}), asked, contract)
    for fields in (
        {},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": 1.0, "loss": 2.0},
        {"seconds": "1"},
    ):
        with pytest.raises(EspalierError, match="BaselineReport"):
            check_reply(MessageBody(asked.header, fields), asked, contract)
    with pytest.raises(EspalierError, match="1 surplus"):
        check_reply(
            MessageBody(asked.header, {"seconds": 1.5}, {"block-0000": b""}), asked, contract
        )


def test_flower_routes_it_to_a_handler_of_its_own() -> None:
    assert FLOWER_TYPES["local_baseline"] == "train.local_baseline"
    assert len(set(FLOWER_TYPES.values())) == len(FLOWER_TYPES)
