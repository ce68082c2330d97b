"""Settings of adapters: names, ranges and patterns are read, or refused with their key."""

from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.settings.run import RunSettings, parse
from espalier.settings.tables.lora import LoraSettings


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


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("targets", "", "neither 'all' nor a list of canonical names"),
        (
            "targets",
            "q_proj",
            "there are attn.q, attn.k, attn.v, attn.qkv, attn.o",
        ),
        ("targets", "all,attn.q", "neither 'all' nor a list of canonical names"),
        ("layers", "", "neither 'all' nor a list of numbers and ranges"),
        ("layers", "-1", "neither 'all' nor"),
        ("layers", "0,4-", "neither 'all' nor"),
        ("layers", "0-99999999999", "neither 'all' nor"),
        ("layers", "0,5-2", "the range 5-2 ends before it begins"),
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
