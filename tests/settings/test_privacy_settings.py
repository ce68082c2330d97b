"""Settings of private runs: what does not go together is refused beforehand, with the remedy."""

from math import nan
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.settings.keys import private_methods, unread
from espalier.settings.node import parse_node
from espalier.settings.registry import METHODS
from espalier.settings.run import parse

PRIVATE = {
    "privacy.epsilon": 4.0, "evaluation.local-baseline": False,
    "federation.client-weights": "equal",
}  # fmt: skip


def of(method: str, **changes: Any) -> dict[str, Any]:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    flat = PRIVATE | {"method": method} | given
    if method == "pooled-pruning":
        del flat["federation.client-weights"]
    return flat


@pytest.mark.parametrize("method", ["fedpetuning", "pooled-pruning"])
def test_methods_with_a_mechanism_may_be_private(method: str) -> None:
    assert parse(of(method)).privacy.on
    assert not parse({"method": method}).privacy.on


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"fedpetuning", "pooled-pruning"}))
def test_every_other_method_is_refused_with_its_reason(method: str) -> None:
    with pytest.raises(EspalierError) as caught:
        parse({"method": method, "privacy.epsilon": 4.0})
    (line,) = str(caught.value).splitlines()[1:]
    reason = "bits of a mask" if method in ("fedprllm", "fedspallm") else "no mechanism"
    assert f"privacy.epsilon = 4: method = '{method}' cannot keep it" in line
    assert reason in line
    assert "choose method = 'fedpetuning' or 'pooled-pruning', or set it to 0" in line


def test_methods_are_found_by_mechanism() -> None:
    assert private_methods() == ("fedpetuning", "pooled-pruning")
    assert private_methods("dp-sgd") == ("fedpetuning",)


@pytest.mark.parametrize(
    ("method", "key", "value", "remedy"),
    [
        ("fedpetuning", "evaluation.local-baseline", True, "set it to false"),
        ("pooled-pruning", "evaluation.own-text", True, "set it to false"),
        ("fedpetuning", "federation.client-weights", "auto", "set it to 'equal'"),
        ("fedpetuning", "training.proximal", 0.1, "set it to 0"),
        ("fedpetuning", "lora.dropout", 0.1, "set it to 0"),
        ("fedpetuning", "training.accumulation", 2, "set it to 1"),
        ("fedpetuning", "training.gradient-checkpointing", True, "set it to false"),
        ("fedpetuning", "training.compile", True, "set it to false"),
        ("fedpetuning", "privacy.max-sequences", 5, "raise training.batch-size"),
        ("pooled-pruning", "dtype", "bfloat16", "set it to 'float32'"),
        ("pooled-pruning", "pruning.strategy", "iterative", "set it to 'one-shot'"),
        (
            "fedpetuning",
            "privacy.honest-fraction",
            0.8,
            "so that each site adds all of its own noise",
        ),
        (
            "pooled-pruning",
            "privacy.honest-fraction",
            0.8,
            "so that each site adds all of its own noise",
        ),
        ("pooled-pruning", "federation.aggregation-rule", "median", "set it to 'mean'"),
    ],
)
def test_what_would_break_the_guarantee_is_refused(
    method: str, key: str, value: object, remedy: str
) -> None:
    with pytest.raises(EspalierError) as caught:
        parse(of(method) | {key: value})
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip().startswith(f"{key} = ")
    assert line.endswith(remedy)


def test_packing_is_refused() -> None:
    task = {"task.name": "chat", "task.packing": True}
    with pytest.raises(EspalierError, match=r"task\.packing = True: would mix records"):
        parse(of("fedpetuning") | task)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("delta", 0.0),
        ("delta", 0.5),
        ("epsilon", -1.0),
        ("epsilon", nan),
        ("clip-norm", 1e-300),
        ("sampling-rate", 1e-12),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(EspalierError, match=rf"privacy\.{key}"):
        parse(of("fedpetuning") | {f"privacy.{key}": value})


def test_an_unknown_key_has_one_error() -> None:
    with pytest.raises(EspalierError) as told:
        parse({"method": "fedpetuning", "privacy.epsilom": 1.0}, by_hand=["privacy.epsilom"])
    assert str(told.value).count("privacy.epsilom") == 1
    assert "did you mean 'privacy.epsilon'?" in str(told.value)


def test_keys_that_a_run_does_not_read_are_told() -> None:
    assert unread({**of("fedpetuning"), "privacy.epsilon": 0.0})["privacy.delta"]
    private = unread(of("pooled-pruning"))
    assert {"privacy.clip-norm", "data.num-samples", "pooled-pruning.weighting"} <= private.keys()
    assert "privacy.delta" not in private
    assert "privacy.clip-norm" not in unread(of("fedpetuning"))
    with pytest.raises(
        EspalierError, match=r"privacy\.delta = 0\.001: .* privacy\.epsilon above 0"
    ):
        parse({"method": "fedpetuning", "privacy.delta": 0.001}, by_hand=["privacy.delta"])


def test_sampling_rates_have_a_default_for_each_mechanism() -> None:
    privacy = parse(of("fedpetuning")).privacy
    assert (privacy.rate("dp-sgd"), privacy.rate("sums")) == (0.1, 1.0)
    assert parse(of("fedpetuning", privacy__sampling_rate=0.3)).privacy.rate("dp-sgd") == 0.3


def test_a_node_owns_a_budget() -> None:
    node = parse_node({"site": "a", "max-epsilon": 8.0, "delta": 1e-6})
    assert (node.max_epsilon, node.delta) == (8.0, 1e-6)
    assert parse_node({"site": "a"}).max_epsilon == 0
    with pytest.raises(EspalierError, match="max-epsilon"):
        parse_node({"site": "a", "max-epsilon": -1.0})
