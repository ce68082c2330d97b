"""Inputs of ``python -m benchmarks.fuzz``: a few thousand of them, and its counts."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from benchmarks.fuzz.__main__ import fuzz
from benchmarks.fuzz.targets import targets
from benchmarks.fuzz.valid_messages import exchanges
from espalier.errors import InputError
from espalier.messages.sums.secure_sum import KINDS as SECURE_KINDS
from espalier.methods.privacy_table import privacy_table
from espalier.settings.registry import METHODS
from tests.toy_method.contract import METHOD as TOY

NAMES = (
    "run settings",
    "node settings",
    "letters",
    "blobs",
    "checkpoint",
    "bundles",
    "documents",
    "tokenizers",
)
INPUTS = 1000


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_a_mistake_comes_of_an_input(name: str, tmp_path: Path) -> None:
    outcome = fuzz(name, targets(tmp_path)[name], 1, range(INPUTS))
    assert outcome.foreign == []
    assert outcome.counts["taken"] + outcome.counts["EspalierError"] == INPUTS
    assert outcome.counts["EspalierError"] > INPUTS / 4


def test_these_are_all_targets(tmp_path: Path) -> None:
    assert tuple(targets(tmp_path)) == NAMES


def test_outcomes_are_counted_and_repeatable() -> None:
    drawn: list[float] = []

    def target(random: Random) -> Iterator[None]:
        drawn.append(random.random())
        yield
        if drawn[-1] < 0.25:
            raise InputError("as it should be")
        if drawn[-1] > 0.75:
            raise KeyError("round")

    outcome = fuzz("made up", target, 3, range(400))
    low = sum(number < 0.25 for number in drawn)
    high = sum(number > 0.75 for number in drawn)
    assert outcome.counts == {"EspalierError": low, "KeyError": high, "taken": 400 - low - high}
    first = next(number for number, value in enumerate(drawn) if value > 0.75)
    assert outcome.foreign[0] == f"made up {first}: KeyError: \"'round'\""
    fuzz("made up", target, 3, range(first, first + 1))
    assert drawn[-1] == drawn[first]


def forms(method: str) -> list[tuple[str, int, tuple[str, ...]]]:
    """Return kind, round and fields of a method's requests.

    Kinds that all methods share are left out.
    """
    bodies = [exchange.request for exchange in exchanges() if exchange.settings.method == method]
    found = [(body.header.kind, body.header.server_round, tuple(body.fields)) for body in bodies]
    shared = ("enrol", "refused", "evaluate", *SECURE_KINDS)
    return [form for form in found if form[0] not in shared]


def test_letters_have_every_method_and_form() -> None:
    kinds: dict[str, set[str]] = {}
    for exchange in exchanges():
        kinds.setdefault(exchange.settings.method, set()).add(exchange.request.header.kind)
    assert kinds.keys() == METHODS.keys()
    assert all(found >= {"enrol", "train", "push", "evaluate"} for found in kinds.values())
    summed = {method for method, row in METHODS.items() if row.summands}
    assert {method for method, found in kinds.items() if found & {*SECURE_KINDS}} == summed
    in_parts = {
        exchange.settings.method for exchange in exchanges() if exchange.reply.header.num_parts > 1
    }
    assert {method for method, found in kinds.items() if "fetch" in found} == in_parts
    assert in_parts >= {"fedpetuning", "fedprllm", "fedspallm", "flap", "llm-streamline"}
    assert forms("llm-streamline") == [
        ("train", 1, ()),
        ("train", 2, ("start",)),
        ("fetch", 2, ("start", "blob_sha256")),
        ("push", 5, ("start",)),
        ("local_baseline", 4, ()),
    ]
    assert forms("llm-pruner") == [
        ("train", 1, ()),
        ("train", 2, ()),
        ("fetch", 1, ("blob_sha256",)),
        ("fetch", 2, ("blob_sha256",)),
        ("push", 3, ()),
        ("local_baseline", 2, ()),
    ]
    assert forms("fedsoda") == [
        ("train", 1, ("rank_limit", "model_sha256", "aligned")),
        ("fetch", 1, ("rank_limit", "rank", "blob_sha256")),
        ("push", 1, ("what", "names", "sizes", "file_sha256", "piece_bytes", "piece_sha256")),
        ("push", 1, ("what", "model_sha256", "index", "size")),
        ("push", 1, ("what", "blocks", "aligned")),
        ("push", 2, ("rank_limit",)),
        ("local_baseline", 10, ("rank_limit",)),
    ]


def test_new_method_is_fuzzed_and_in_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The row of the table is sufficient; a reply of one blob is never fetched."""
    monkeypatch.setitem(METHODS, "toy", TOY)
    assert forms("toy") == [("train", 1, ()), ("push", 1, ())]
    for name in ("run settings", "letters"):
        assert fuzz(name, targets(tmp_path)[name], 1, range(200)).foreign == []
    assert "| train | `toy` | mean (F32); " in privacy_table().replace(" per matrix", "")
