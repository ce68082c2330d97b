"""Similarity group pruning against transformers' hidden states and an exhaustive search."""

import math
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.hf.group_scores.similar_groups import (
    Group,
    angular_distances,
    dropped_of_groups,
    evenly_dropped,
    index_map,
    similar_groups,
)
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from tests.tiny_model import save_tiny_llama

BLOCKS = 6
CPU = Computing(torch.device("cpu"), torch.float32, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"), blocks=BLOCKS, dtype=torch.float32)


@pytest.mark.parametrize("apart", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_distances_are_angles_at_last_token(model: Path, apart: int, first: int) -> None:
    samples = torch.randint(3, 260, (5, 12), generator=torch.Generator().manual_seed(0))
    emulator = range(first, BLOCKS - 1)
    found = angular_distances(BlockStream(OpenedModel(model), CPU), samples, apart, emulator)
    with torch.no_grad():
        states = AutoModelForCausalLM.from_pretrained(model)(
            samples, output_hidden_states=True
        ).hidden_states
    # The first hidden state is the output of the embeddings.
    outputs = [state[:, -1].double() for state in states[1:]]
    expected = []
    for index in emulator:
        if index + apart in emulator:
            one = outputs[index]
            other = outputs[index + apart]
            angles = [
                math.acos(min(1.0, float(a @ b / (a.norm() * b.norm())))) / math.pi
                for a, b in zip(one, other, strict=True)
            ]
            expected.append(sum(angles) / len(angles))
    assert found == pytest.approx(expected, abs=1e-4)
    assert len(found) == len(emulator) - apart


def test_groups_stay_inside_and_do_not_overlap() -> None:
    """The last possible group ends with the emulator, one start before the paper's last."""
    # An emulator of 8 blocks and groups of n = 2.
    distances = [0.5, 0.1, 0.4, 0.1, 0.3, 0.05]
    starts = similar_groups(distances, 2, 2, 1)
    choices = [
        pair for pair in combinations(range(6), 2) if all(b - a >= 3 for a, b in pairwise(pair))
    ]
    best = min(choices, key=lambda pair: sum(distances[start] for start in pair))
    assert [start - 1 for start in starts] == list(best)
    dropped = dropped_of_groups(starts, 2)
    assert dropped == [start + behind for start in starts for behind in (1, 2)]
    assert max(dropped) <= 8


def test_the_index_map_counts_what_went_before() -> None:
    assert index_map([1, 5], [2, 3, 6, 7]) == [Group(1, 1), Group(5, 3)]


@pytest.mark.parametrize(
    ("emulator", "number", "nearest", "down"),
    [
        (range(5), 0, [], []),
        (range(5), 2, [1, 3], [1, 3]),
        (range(1, 6), 2, [2, 4], [2, 4]),
        # Places 0, 1.5 and 3; an exact half is rounded to the even place.
        (range(4), 1, [1], [2]),
        (range(6), 3, [1, 3, 4], [1, 3, 4]),
        # Places 0, 5/3, 10/3 and 5.
        (range(2, 8), 2, [3, 6], [4, 6]),
        (range(4), 3, [1, 2, 3], [1, 2, 3]),
    ],
)
def test_blocks_go_at_even_distances(
    emulator: range, number: int, nearest: list[int], down: list[int]
) -> None:
    assert evenly_dropped(emulator, number, "nearest") == nearest
    assert evenly_dropped(emulator, number, "down") == down


def test_rounding_down_matches_published_code() -> None:
    """12 of 16 blocks stay, 15/11 blocks apart.

    In floating point the last place is 14.999999999999998, so block 14 stays in place of block 15.
    """
    assert evenly_dropped(range(16), 4, "down") == [3, 7, 11, 15]
    assert evenly_dropped(range(16), 4, "nearest") == [2, 6, 9, 13]
