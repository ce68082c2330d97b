"""Figures of an evaluation between rounds, in the line of the run that shows them."""

from typing import Any

import pytest

from strategies.base.evaluation import in_words


@pytest.mark.parametrize(
    ("measurement", "words"),
    [
        ({"round": 1, "perplexity": {"code": 80.123, "documentation": 5e7}},
         "code 80.12, documentation 5e+07"),
        ({"round": 1, "scores": {"accuracy": 0.51234}, "seconds": 3.0}, "accuracy 0.512"),
        ({"scores": {"f1": {"0": 0.25, "1": 0.75}}}, "f1 0.500 (mean of 2 clients)"),
        ({"perplexity": {"code": {"0": 2.5}}}, "code 2.50"),
        ({"perplexity": {"code": {"0": 2.5, "1": None}}}, "code - (mean of 2 clients)"),
        ({"perplexity": {"code": None}}, "code -"),
        ({"round": 1}, ""),
    ],
)  # fmt: skip
def test_figures_in_words(measurement: dict[str, Any], words: str) -> None:
    assert in_words(measurement) == words
