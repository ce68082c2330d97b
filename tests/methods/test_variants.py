"""Every method, and every variant of one, is in the tests' lists.

A variant is the value of a setting that stands for a method of its own, such as FedEx-LoRA.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from espalier.settings.keys import as_text, choices, default_values
from espalier.settings.registry import METHODS
from tests.federation.aggregation.test_one_bad_client import CASES
from tests.methods.promises.promises import Promises
from tests.processes.method_runs import RUNS

VARIANT_KEYS = ("fedpetuning.aggregation", "hetlora.aggregation", "hetlora.rank-weights")
VARIANTS = {
    f"{key}={as_text(value)}"
    for key in VARIANT_KEYS
    for value in choices()[key]
    if value != default_values()[key]
}
TOGETHER = {frozenset({"hetlora.aggregation=svd", "hetlora.rank-weights=holders"})}
"""Values of two settings that together stand for a method (raFLoRA as in its paper)."""
HERE = Path(__file__).parent


def subclasses(kind: type[Promises]) -> Iterator[type[Promises]]:
    """Return all classes of promises, however deep."""
    for own in kind.__subclasses__():
        yield own
        yield from subclasses(own)


def words_of_promises() -> dict[str, set[str]]:
    """Return the settings of each class of promises, by method and class."""
    for path in HERE.rglob("test_*.py"):
        parts = path.relative_to(HERE.parents[1]).with_suffix("").parts
        importlib.import_module(".".join(parts))
    return {
        f"{own.method} {own.__name__}": as_words(own.settings)
        for own in subclasses(Promises)
        if own.__name__.startswith("Test")
    }


def as_words(settings: Mapping[str, object]) -> set[str]:
    return {f"{key}={as_text(value)}" for key, value in settings.items()}


def words_of_runs() -> dict[str, set[str]]:
    return {name: set(words) for name, (words, _) in RUNS.items()}


def words_of_bad_clients() -> dict[str, set[str]]:
    return {name: as_words(case.settings) for name, case in CASES.items()}


@pytest.mark.parametrize("entries_of", [words_of_promises, words_of_runs, words_of_bad_clients])
def test_every_method_and_variant_is_in_the_list(
    entries_of: Callable[[], dict[str, set[str]]],
) -> None:
    entries = entries_of()
    assert METHODS.keys() - {name.split()[0] for name in entries} == set()
    assert VARIANTS - set().union(*entries.values()) == set()
    assert all(any(pair <= words for words in entries.values()) for pair in TOGETHER)
