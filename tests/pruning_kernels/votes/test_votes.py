"""Votes against nested loops, and the selection against a plain ``sorted``."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.selection.comparison_groups import ComparisonGroup
from pruning_kernels.votes.bitmask import count, stack_of_masks, unpack
from pruning_kernels.votes.vote_counter import vote_counter
from pruning_kernels.votes.votes import VoteCounter, magnitudes

pytestmark = pytest.mark.usefixtures("way")

GROUPS: list[ComparisonGroup] = ["layer", "row", "column"]


def words_of(bits: list[bool]) -> np.ndarray:
    """Return the packed mask, by integer arithmetic."""
    words = [0] * ((len(bits) + 63) // 64)
    for index, bit in enumerate(bits):
        words[index // 64] += int(bit) << (index % 64)
    return np.array(words, dtype=np.uint64)


def counter_of(shape: tuple[int, int], masks: list[list[bool]]) -> VoteCounter:
    """Return a counter that was given the masks in two ranges of words if there are two words."""
    counter = vote_counter(shape, len(masks))
    words = np.stack([words_of(mask) for mask in masks])
    half = words.shape[1] // 2
    if half:
        counter.count(words[:, :half])
    counter.count(words[:, half:], half)
    return counter


def counted(masks: list[list[bool]]) -> list[int]:
    """Return the votes of the counter under test."""
    return counter_of((1, len(masks[0])), masks).counts()[0].tolist()


def masks_with(counts: list[list[int]]) -> list[list[bool]]:
    """Return masks in which weight ``i`` gets the votes of the first ``counts[i]`` voters."""
    flat = [count for line in counts for count in line]
    return [[voter < count for count in flat] for voter in range(max(1, *flat))]


def selected(
    counts: list[list[int]],
    sparsity: float,
    group: ComparisonGroup,
    sizes: list[list[float]] | None,
    dtype: str = "float32",
) -> list[list[bool]]:
    """Return the counter's selection; the sizes are passed as the bits of floats."""
    shape = (len(counts), len(counts[0]))
    bits = None if sizes is None else magnitudes(torch.tensor(sizes, dtype=getattr(torch, dtype)))
    words = counter_of(shape, masks_with(counts)).most_voted(sparsity, group, bits)
    return unpack(words, shape).tolist()


def most_voted_by_sorting(
    counts: list[list[int]], sparsity: float, group: str, keys: list[list[float]] | None
) -> list[list[bool]]:
    """Sort each group by (-votes, key, index) and prune its first weights."""
    rows = len(counts)
    columns = len(counts[0])
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    kept, _, of = group.partition(":")
    number = {
        "layer": lambda cell: 0,
        "row": lambda cell: cell[0],
        "column": lambda cell: cell[1],
    }.get(group, lambda cell: cell[0] * columns + cell[1] // int(of or 1))
    pruned = [[False] * columns for _ in range(rows)]
    lines = dict[int, list[tuple[int, int]]]()
    for cell in cells:
        lines.setdefault(number(cell), []).append(cell)
    for competing in lines.values():
        order = sorted(
            range(len(competing)),
            key=lambda index: (
                -counts[competing[index][0]][competing[index][1]],
                keys[competing[index][0]][competing[index][1]] if keys else 0,
                index,
            ),
        )
        for index in order[: int(of) - int(kept) if of else int(len(competing) * sparsity)]:
            row, column = competing[index]
            pruned[row][column] = True
    return pruned


@st.composite
def votes_and_keys(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]]]:
    rows = draw(st.integers(1, 8))
    columns = draw(st.integers(1, 8))
    highest = draw(st.sampled_from([0, 1, 3, 300]))
    line = lambda values: st.lists(values, min_size=columns, max_size=columns)  # noqa: E731
    counts = draw(st.lists(line(st.integers(0, highest)), min_size=rows, max_size=rows))
    keys = draw(st.lists(line(st.sampled_from([0.0, 0.5, 1.5])), min_size=rows, max_size=rows))
    return counts, keys


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_counts_equal_nested_loops(data: st.DataObject) -> None:
    weights = data.draw(st.integers(1, 150))
    mask = st.lists(st.booleans(), min_size=weights, max_size=weights)
    masks = data.draw(st.lists(mask, min_size=1, max_size=9))
    expected = [0] * weights
    for one in masks:
        for index, bit in enumerate(one):
            expected[index] += bit
    assert counted(masks) == expected


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 8, 16, 33])
def test_trimmed_votes_equal_loops(clients: int) -> None:
    """Sort the votes of each weight, and add up those that stay."""
    masks = [[voter < votes for votes in range(clients + 1)] for voter in range(clients)]
    for trim in range((clients - 1) // 2 + 1):
        counter = counter_of((1, clients + 1), masks)
        counter.trim(trim)
        assert counter.num_voters == clients - 2 * trim
        votes = [sorted(mask[weight] for mask in masks) for weight in range(clients + 1)]
        expected = [sum(own[trim : clients - trim]) for own in votes]
        assert counter.counts()[0].tolist() == expected
        unanimous = unpack(counter.unanimous(), (1, clients + 1))[0].tolist()
        assert unanimous == [number == clients - 2 * trim for number in expected]


def test_trimmed_votes_leave_ties_to_the_sizes() -> None:
    """Of five voters two vote for weight 0: without the two most extreme votes it has none.

    Weight 3 has four votes, all three that remain. The second place goes to the smallest weight.
    """
    shape = (1, 4)
    masks = masks_with([[2, 1, 0, 4]])
    masks.append([False] * 4)
    sizes = magnitudes(torch.tensor([[3.0, 2.0, 1.0, 9.0]]))
    counter = counter_of(shape, masks)
    assert unpack(counter.most_voted(0.5, "layer", sizes), shape).tolist() == [[1, 0, 0, 1]]
    counter.trim(2)
    assert counter.counts().tolist() == [[0, 0, 0, 1]]
    assert unpack(counter.most_voted(0.5, "layer", sizes), shape).tolist() == [[0, 0, 1, 1]]


def test_trim_that_leaves_no_voter_is_refused() -> None:
    counter = counter_of((1, 4), masks_with([[2, 1, 0, 4]]))
    with pytest.raises(ValueError, match="2 of 4 votes cannot be left out"):
        counter.trim(2)


@pytest.mark.parametrize("clients", [127, 128, 129, 255, 256, 257, 300])
def test_more_clients_than_a_byte_holds(clients: int) -> None:
    """Weight 0 gets all votes, weight 1 none, weight 2 every second one, weight 66 the last one."""
    masks = [
        [True, False, client % 2 == 0] + [False] * 63 + [client == clients - 1]
        for client in range(clients)
    ]
    counts = counted(masks)
    assert (counts[0], counts[1], counts[2], counts[66]) == (clients, 0, (clients + 1) // 2, 1)
    assert sum(counts) == clients + (clients + 1) // 2 + 1


def test_counts_ignore_order_of_arrival() -> None:
    masks = [[(index * client) % 3 == 0 for index in range(70)] for client in range(1, 8)]
    assert counted(masks) == counted(masks[::-1])


@pytest.mark.parametrize(
    ("voters", "words"), [(64, 40), (41, 4097), (33, 8192), (8, 70), (7, 9), (1, 1)]
)
def test_votes_of_random_words(voters: int, words: int) -> None:
    """Covers groups of 32 and 8 voters, single voters, and full and partial tiles."""
    masks = np.random.default_rng(voters).integers(0, 2**64, (voters, words), dtype=np.uint64)
    counter = vote_counter((1, 64 * words), voters)
    counter.count(masks)
    expected = sum(unpack(mask, (1, 64 * words)).astype(int) for mask in masks)
    assert (counter.counts() == expected).all()
    assert (unpack(counter.unanimous(), (1, 64 * words)) == (expected == voters)).all()

    stack = stack_of_masks(voters, words)
    apart = vote_counter((1, 64 * words), voters)
    stack[:] = masks
    apart.count(stack[:, : words // 2])
    apart.count(stack[:, words // 2 :], words // 2)
    assert (apart.counts() == expected).all()

    turned = vote_counter((1, 64 * words), voters)
    turned.count(np.asfortranarray(masks))
    assert (turned.counts() == expected).all()


@pytest.mark.parametrize("shape", [(1, 65), (2, 64)])
def test_masks_of_another_size_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 masks of 2 words"):
        vote_counter(shape, 1).count(np.zeros((1, 3), dtype=np.uint64))
    with pytest.raises(ValueError, match="expected 2 masks"):
        vote_counter(shape, 2).count(np.zeros((1, 2), dtype=np.uint64))
    with pytest.raises(ValueError, match="at 1"):
        vote_counter(shape, 1).count(np.zeros((1, 2), dtype=np.uint64), 1)


def test_selection_on_paper() -> None:
    """Half of six: the two weights with 3 votes, then the smaller one of those with 2 votes."""
    counts = [[3, 2, 0], [2, 3, 1]]
    magnitude = [[9.0, -0.7, 0.0], [0.2, 9.0, 0.0]]
    assert selected(counts, 0.5, "layer", magnitude) == [[True, False, False], [True, True, False]]
    assert selected(counts, 0.5, "layer", None) == [[True, True, False], [False, True, False]]


@settings(max_examples=80, deadline=None)
@given(
    votes_and_keys(),
    st.floats(0, 0.999),
    st.sampled_from(GROUPS),
    st.sampled_from(["", "float32", "bfloat16", "float16"]),
)
def test_selection_equals_sorting(
    drawn: tuple[list[list[int]], list[list[float]]],
    sparsity: float,
    group: ComparisonGroup,
    dtype: str,
) -> None:
    counts, keys = drawn
    found = selected(counts, sparsity, group, keys if dtype else None, dtype or "float32")
    assert found == most_voted_by_sorting(counts, sparsity, group, keys if dtype else None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("group", [*GROUPS, "2:5", "8:40"])
@pytest.mark.parametrize("shape", [(13, 200), (64, 40), (3, 1000)])
def test_large_matrices_with_many_ties(
    shape: tuple[int, int], group: ComparisonGroup, dtype: str
) -> None:
    """Some rows begin inside a word, and some tied sizes have their sign bit set."""
    generator = np.random.default_rng(1)
    counts = generator.integers(0, 4, shape)
    masks = masks_with(counts.tolist())
    weight = torch.tensor(
        generator.choice([-2.5, -0.001, 0.0, 0.001, 1.0, 7.0, -300.0], shape),
        dtype=getattr(torch, dtype),
    )
    keys = weight.abs().double().tolist()
    for sparsity in (0.0, 0.3, 0.97):
        words = counter_of(shape, masks).most_voted(sparsity, group, magnitudes(weight))
        expected = most_voted_by_sorting(counts.tolist(), sparsity, group, keys)
        assert unpack(words, shape).tolist() == expected
        assert count(words) == sum(map(sum, expected))


@pytest.mark.parametrize("group", GROUPS)
def test_equal_votes_and_equal_keys_go_by_index(group: ComparisonGroup) -> None:
    counts = [[4] * 6 for _ in range(4)]
    assert selected(counts, 0.5, group, [[0.0] * 6] * 4) == most_voted_by_sorting(
        counts, 0.5, group, None
    )


@pytest.mark.parametrize("sampled", [0, 40, 64])
@pytest.mark.parametrize("sparsity", [0.01, 0.5, 0.98])
def test_most_voted_despite_unlike_first_lines(sampled: int, sparsity: float) -> None:
    """The compiled kernel guesses the threshold from the first 512 of every 61 * 512 weights."""
    generator = np.random.default_rng(1)
    counts = generator.integers(0, 65, 2 * 64 * 512)
    for first in range(0, counts.size, 61 * 512):
        counts[first : first + 512] = sampled
    shape = (256, 256)
    voters = np.arange(64)
    masks = np.stack(
        [np.packbits(counts > voter, bitorder="little").view("<u8") for voter in voters]
    ).astype(np.uint64)
    counter = vote_counter(shape, 64)
    counter.count(masks)
    order = np.argsort(-counts, kind="stable")
    expected = np.zeros(counts.size, np.bool_)
    expected[order[: int(counts.size * sparsity)]] = True
    assert np.array_equal(
        unpack(counter.most_voted(sparsity, "layer"), shape).reshape(-1), expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [300, 30000])
def test_ties_of_a_layer_however_many(tied: int, dtype: torch.dtype) -> None:
    """Half of the tied weights are pruned: those of smaller magnitude, whatever their sign."""
    shape = (200, 200)
    generator = np.random.default_rng(2)
    counts = generator.choice([0, 2], shape[0] * shape[1])
    places = generator.permutation(counts.size)[:tied]
    counts[places] = 1
    weight = torch.from_numpy(generator.standard_normal(shape)).to(dtype)
    sparsity = ((counts == 2).sum() + tied // 2 + 0.5) / counts.size
    masks = np.stack(
        [np.packbits(counts > voter, bitorder="little").view("<u8") for voter in range(2)]
    ).astype(np.uint64)
    counter = vote_counter(shape, 2)
    counter.count(masks)
    order = np.lexsort((np.arange(counts.size), weight.abs().double().numpy().reshape(-1), -counts))
    expected = np.zeros(counts.size, np.bool_)
    expected[order[: int(counts.size * sparsity)]] = True
    found = unpack(counter.most_voted(sparsity, "layer", magnitudes(weight)), shape).reshape(-1)
    assert np.array_equal(found, expected)


@settings(max_examples=40, deadline=None)
@given(votes_and_keys(), st.floats(0, 0.999), st.sampled_from(GROUPS))
def test_every_group_loses_exactly_its_share(
    drawn: tuple[list[list[int]], list[list[float]]], sparsity: float, group: ComparisonGroup
) -> None:
    mask = np.array(selected(drawn[0], sparsity, group, None))
    lines = {"layer": [mask.reshape(-1)], "row": list(mask), "column": list(mask.T)}[group]
    assert {sum(line.tolist()) for line in lines} == {int(len(lines[0]) * sparsity)}


def test_unanimous_clients_get_their_own_mask() -> None:
    """The paper's sanity check: if all clients agree, the votes change nothing."""
    own = [[True, False, False, True], [False, True, True, False]]
    counter = counter_of((2, 4), [own[0] + own[1]] * 5)
    assert unpack(counter.most_voted(0.5, "layer"), (2, 4)).tolist() == own


def test_magnitudes_order_as_absolute_values() -> None:
    values = torch.tensor([[0.0, -0.0, 1e-30, -3.5, 3.5, float("inf")]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        bits = magnitudes(values.to(dtype))
        assert bits.dtype == (np.uint16 if dtype.itemsize == 2 else np.uint32)
        sizes = (bits & (np.iinfo(bits.dtype).max >> 1))[0].tolist()
        assert sizes[0] == sizes[1] <= sizes[2] < sizes[3] == sizes[4] < sizes[5]


@pytest.mark.parametrize("voters", [1, 3, 8, 9])
def test_votes_from_their_sum_are_those_of_the_masks(voters: int) -> None:
    generator = np.random.default_rng(voters)
    shape = (6, 50)
    masks = (generator.random((voters, 300)) < generator.random(300)).tolist()
    one = counter_of(shape, masks)
    other = vote_counter(shape, voters)
    other.take_counts(np.sum(masks, axis=0).astype(np.uint64))
    np.testing.assert_array_equal(one.counts(), other.counts())
    np.testing.assert_array_equal(one.unanimous(), other.unanimous())
    sizes = magnitudes(torch.randn(shape, generator=torch.Generator().manual_seed(voters)))
    for group in GROUPS:
        found = (counter.most_voted(0.5, group, sizes) for counter in (one, other))
        np.testing.assert_array_equal(*found)


def test_more_votes_than_voters_are_unanimous() -> None:
    """A client may add 3 to a sum of votes in place of 0 or 1."""
    counter = vote_counter((1, 4), 3)
    counter.take_counts(np.array([0, 3, 7, 2], np.uint64))
    assert counter.counts().tolist() == [[0, 3, 3, 2]]
    assert unpack(counter.unanimous(), (4,)).tolist() == [False, True, True, False]
