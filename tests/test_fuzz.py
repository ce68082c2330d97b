"""A few thousand of the inputs of ``python -m benchmarks.fuzz``, and its own counting."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from benchmarks.fuzz.__main__ import fuzz
from benchmarks.fuzz.targets import targets
from espalier.settings.mistakes import Mistake

NAMES = ("run settings", "node settings", "letters", "blobs", "checkpoint")
INPUTS = 1000


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_a_mistake_comes_of_an_input(name: str, tmp_path: Path) -> None:
    outcome = fuzz(name, targets(tmp_path)[name], 1, range(INPUTS))
    assert outcome.foreign == []
    assert outcome.counts["taken"] + outcome.counts["Mistake"] == INPUTS
    assert outcome.counts["Mistake"] > INPUTS / 4


def test_these_are_all_targets(tmp_path: Path) -> None:
    assert tuple(targets(tmp_path)) == NAMES


def test_what_comes_of_each_input_is_counted_and_an_input_repeats_by_its_number() -> None:
    drawn: list[float] = []

    def target(random: Random) -> Iterator[None]:
        drawn.append(random.random())
        yield
        if drawn[-1] < 0.25:
            raise Mistake("as it should be")
        if drawn[-1] > 0.75:
            raise KeyError("round")

    outcome = fuzz("made up", target, 3, range(400))
    low, high = sum(number < 0.25 for number in drawn), sum(number > 0.75 for number in drawn)
    assert outcome.counts == {"Mistake": low, "KeyError": high, "taken": 400 - low - high}
    first = next(number for number, value in enumerate(drawn) if value > 0.75)
    assert outcome.foreign[0] == f"made up {first}: KeyError: \"'round'\""
    fuzz("made up", target, 3, range(first, first + 1))
    assert drawn[-1] == drawn[first]
