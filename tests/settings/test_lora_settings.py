"""Settings of adapters: names, ranges and patterns are read, or refused with their key."""

from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.settings.lora import LoraSettings
from espalier.settings.run import RunSettings, parse


def lora(**values: Any) -> LoraSettings:
    """Return LoRA settings that are parsed with the run's settings, as for a user."""
    keys = {f"lora.{name.replace('_', '-')}": value for name, value in values.items()}
    settings: RunSettings = parse({"method": "fedpetuning", **keys})
    return settings.lora


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("0", [0]),
        ("4-5,0", [0, 4, 5]),
        ("1-3, 2-4", [1, 2, 3, 4]),
        ("3-3", [3]),
        ("7", [7]),
    ],
)
def test_layers_are_numbers_and_ranges(layers: str, numbers: list[int]) -> None:
    assert lora(layers=layers).layer_numbers(6) == numbers


def test_targets_are_names() -> None:
    names = ["attn.q", "attn.k", "mlp.up"]
    assert lora(targets="all").target_names(names) == names
    assert lora(targets="mlp.up, attn.q").target_names(names) == ["mlp.up", "attn.q"]
    assert lora(targets="mlp.gate").target_names(names) == ["mlp.gate"]


def test_patterns_by_hand() -> None:
    """The entry of a block has priority over that of all blocks.

    alpha / rank is 2 if no alpha is given.
    """
    settings = lora(
        rank=8,
        alpha=16.0,
        targets="all",
        rank_pattern="attn.q=4,1.attn.q=16",
        alpha_pattern="mlp.up=4, 0.mlp.up=2.5",
    )
    found = [[settings.rank_of(block, name) for name in ("attn.q", "mlp.up")] for block in (0, 1)]
    assert found == [[4, 8], [16, 8]]
    scalings = [
        [settings.scaling_of(block, name) for name in ("attn.q", "mlp.up")] for block in (0, 1)
    ]
    assert scalings == [[2.0, 2.5 / 8], [2.0, 0.5]]
    assert settings.largest_rank == 16
    assert settings.named_in_patterns() == {
        "rank-pattern": ["attn.q", "1.attn.q"],
        "alpha-pattern": ["mlp.up", "0.mlp.up"],
    }


@pytest.mark.parametrize(
    ("targets", "pattern", "largest"),
    [
        ("attn.q,attn.v", "", 8),
        ("attn.q,attn.v", "attn.q=4", 8),
        ("attn.q,attn.v", "attn.q=4,attn.v=2", 4),
        ("attn.v, attn.q", "attn.q=2,attn.v=2,1.attn.q=6", 6),
        ("attn.q", "attn.q=16", 16),
        # The other blocks have rank 8.
        ("attn.q", "0.attn.q=4", 8),
        ("attn.q,attn.v", "attn.q=4,0.attn.v=4", 8),
        ("all", "attn.q=4,attn.v=4", 8),
    ],
)
def test_the_largest_rank_is_one_that_an_adapter_can_have(
    targets: str, pattern: str, largest: int
) -> None:
    settings = lora(rank=8, targets=targets, rank_pattern=pattern)
    assert settings.largest_rank == largest
    ranks = {
        settings.rank_of(block, name)
        for block in range(3)
        for name in settings.target_names(["attn.q", "mlp.up"])
    }
    assert max(ranks) == largest


def test_an_alpha_of_its_own_is_divided_by_the_rank_of_its_own() -> None:
    assert lora(rank_pattern="attn.q=4", alpha_pattern="attn.q=6").scaling_of(0, "attn.q") == 1.5


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("targets", "", "neither 'all' nor a list of canonical names"),
        (
            "targets",
            "q_proj",
            "there are attn.q, attn.k, attn.v, attn.o, mlp.gate, mlp.up, mlp.down",
        ),
        ("targets", "all,attn.q", "neither 'all' nor a list of canonical names"),
        ("layers", "", "neither 'all' nor a list of numbers and ranges"),
        ("layers", "-1", "neither 'all' nor"),
        ("layers", "0,4-", "neither 'all' nor"),
        ("layers", "0-99999999999", "neither 'all' nor"),
        ("layers", "0,5-2", "the range 5-2 ends before it begins"),
        ("rank-pattern", "attn.q", "'attn.q' is no name=number"),
        ("rank-pattern", "attn.q=x", "is no name=number"),
        ("rank-pattern", "attn.q=1.2.3", "'1.2.3' is no number"),
        ("rank-pattern", "attn.q=2.5", "ranks must be positive integers"),
        ("rank-pattern", "attn.q=0", "ranks must be positive integers"),
        ("rank-pattern", "attn.q=" + "9" * 400, "ranks must be positive integers"),
        ("rank-pattern", "attn.q=4,attn.q=8", "attn.q is named twice"),
        ("alpha-pattern", "0.attn.q=0", "alphas must be numbers greater than 0"),
        ("alpha-pattern", "0.attn.q=" + "9" * 400, "alphas must be numbers greater than 0"),
        ("alpha", 0.0, "greater than 0"),
        ("dropout", 0.6, "less than or equal to 0.5"),
        ("dropout", 1.0, "less than or equal to 0.5"),
        ("rank", 0, "greater than or equal to 1"),
    ],
)
def test_a_mistake_names_its_key(key: str, value: Any, words: str) -> None:
    with pytest.raises(EspalierError) as caught:
        parse({"method": "fedpetuning", f"lora.{key}": value})
    assert f"lora.{key} = {value!r}: " in str(caught.value)
    assert words in str(caught.value)
