"""Setting ``federation.aggregation-rule``: what methods can have, and what is refused."""

import pytest

from espalier.errors import InputError
from espalier.settings.registry import METHODS, settings_of
from espalier.settings.run import parse
from espalier.settings.tables.federation import NO_LIMIT, FederationSettings

RULE = "federation.aggregation-rule"


def test_every_method_reads_the_rule() -> None:
    for method in METHODS:
        job = settings_of(method)
        assert "aggregation-rule" in job.FEDERATION
        assert parse({"method": method}).federation.aggregation_rule == job.RULES[0]
        # The number to leave out is read by those that can leave something out, and no others.
        trims = "trimmed-mean" in job.RULES
        assert ("trimmed-clients" in job.FEDERATION) == trims == ("median" in job.RULES)


def test_rules_that_a_method_cannot_have_are_refused_with_the_reason() -> None:
    for method in METHODS:
        job = settings_of(method)
        for rule in {"mean", "clipped-mean", "trimmed-mean", "median"} - set(job.RULES):
            assert job.WHY_NO_OTHER_RULE
            with pytest.raises(InputError) as caught:
                parse({"method": method, RULE: rule})
            assert f"'{rule}': {method} cannot use this rule: " in str(caught.value)
            assert "; set it to 'auto' or" in str(caught.value)
            assert job.WHY_NO_OTHER_RULE in str(caught.value)


def test_updates_have_no_coordinates() -> None:
    svd = {"method": "fedpetuning", "fedpetuning.aggregation": "svd"}
    with pytest.raises(InputError, match="the server never computes"):
        parse({**svd, RULE: "median"})
    assert parse({**svd, RULE: "mean"}).federation.aggregation_rule == "mean"


def test_too_few_clients_are_refused() -> None:
    for rule in ("median", "trimmed-mean"):
        with pytest.raises(InputError, match="needs three clients in a round, and there are 2"):
            parse({"method": "fedprllm", "num-clients": 2, RULE: rule})
    trimmed = {"method": "fedpetuning", RULE: "trimmed-mean", "num-clients": 8}
    with pytest.raises(InputError, match=r"trimmed-clients = 4: at most 3 values .* of 8"):
        parse({**trimmed, "federation.trimmed-clients": 4})
    with pytest.raises(InputError, match=r"trimmed-clients = 2: at most 1 values .* of 4"):
        parse({**trimmed, "federation.trimmed-clients": 2, "federation.sampled-clients": 0.5})
    with pytest.raises(InputError, match="it needs three clients; set it to 'mean'"):
        parse({"method": "pooled-pruning", "num-clients": 2, RULE: "clipped-mean"})


@pytest.mark.parametrize(
    ("rule", "clients", "trim"),
    [
        ("mean", 8, 0),
        ("clipped-mean", 8, 0),
        ("trimmed-mean", 8, 2),
        # Fewer clients answered than the settings need.
        ("trimmed-mean", 4, 1),
        ("trimmed-mean", 2, 0),
        ("median", 8, 3),
        ("median", 7, 3),
        ("median", 1, 0),
    ],
)
def test_numbers_that_are_left_out(rule: str, clients: int, trim: int) -> None:
    table = {"aggregation-rule": rule, "trimmed-clients": 2}
    assert FederationSettings.model_validate(table).trim(clients) == trim


def test_unread_numbers_are_refused() -> None:
    with pytest.raises(InputError, match=r"max-update-ratio = 3.0: .* does not read it"):
        parse(
            {"method": "fedpetuning", RULE: "median", "federation.max-update-ratio": 3.0},
            by_hand=["federation.max-update-ratio"],
        )
    with pytest.raises(InputError, match=r"trimmed-clients = 2: .* does not read it"):
        parse(
            {"method": "fedpetuning", "federation.trimmed-clients": 2},
            by_hand=["federation.trimmed-clients"],
        )
    with pytest.raises(InputError, match=r"max-weight-ratio = 3.0: .* does not read it"):
        parse(
            {"method": "pooled-pruning", "federation.max-weight-ratio": 3.0},
            by_hand=["federation.max-weight-ratio"],
        )


def test_equal_weights_read_the_limit_only_if_ranks_have_holders() -> None:
    """A client that holds a rank with few others has a large share of it with equal weights."""
    limit = "federation.max-weight-ratio"
    equal = {"method": "hetlora", "federation.client-weights": "equal", limit: 1e6}
    holders = {**equal, "hetlora.rank-weights": "holders"}
    assert parse(holders, by_hand=[limit]).federation.weight_limit == 1e6
    with pytest.raises(InputError, match=r"client-weights = 'equal' does not read it"):
        parse(equal, by_hand=[limit])
    with pytest.raises(InputError, match=r"aggregation-rule = 'mean' does not read it"):
        parse({**holders, RULE: "mean"}, by_hand=[limit])


def test_secure_sums_leave_the_mean() -> None:
    for method, row in METHODS.items():
        if row.summands:
            given = {"method": method, "num-clients": 4, **settings_of(method).SUMMED_WITH}
            run = parse({**given, "federation.secure-sum": True})
            assert run.federation.aggregation_rule == "mean"
            assert run.federation.update_limit == run.federation.weight_limit == NO_LIMIT
    for rule in ("clipped-mean", "trimmed-mean", "median"):
        given = {"method": "flap", "federation.secure-sum": True, RULE: rule, "num-clients": 8}
        with pytest.raises(InputError, match=f"{RULE} = '{rule}' compares single clients"):
            parse(given)


def test_limits_are_not_read_in_a_plain_mean() -> None:
    for key in ("max-weight-ratio", "max-update-ratio"):
        given = {"method": "flap", RULE: "mean", f"federation.{key}": 3.0}
        with pytest.raises(InputError, match=f"{key} = 3.0"):
            parse(given, by_hand=[f"federation.{key}"])
