"""Selection of the most voted weights, in numba.

For a whole layer it works on the bit planes of the votes, (number of planes, words) uint64 with
zeros after the last weight; the result is flat words as in ``bitmask``. For smaller comparison
groups it works on the numbers of votes. ``sizes`` breaks ties between equally voted weights:
unsigned integers whose upper bit is ignored, so that the bits of a float count as its magnitude. If
it is empty, the lower index goes first.
"""

import numpy as np
from numba import get_num_threads, prange
from numpy.typing import NDArray

from pruning_kernels.compiled import compiled
from pruning_kernels.selection.lowest import threshold_of
from pruning_kernels.votes.bit_instructions import lowest_bit, popcount
from pruning_kernels.votes.bitmask import LINE_WORDS, Words

ONE = np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
TILE = 512
"""Number of words that are compared together; their results stay in the first-level cache."""
SAMPLE = 61
"""Sampling interval, in lines, of the guess of the vote threshold.

It does not divide the length of a row, so that all columns are sampled.
"""
FEW = 16
"""Inverse fraction of tied weights up to which ties are sorted out without a histogram."""

Planes = NDArray[np.uint64]
Sizes = NDArray[np.unsignedinteger]
Places = NDArray[np.int64]
Keys = NDArray[np.uint32]


def most_voted_in_layer(planes: Planes, num_weights: int, quota: int, sizes: Sizes) -> Words:
    """Prune the ``quota`` most voted of all weights.

    The vote threshold is guessed from a sample, and the guess is verified on all planes. If it is
    wrong, other thresholds are tried at growing distances. Once the threshold is bracketed, the
    search continues by bisection.
    """
    pruned = np.empty(planes.shape[1], np.uint64)
    tied = np.empty(planes.shape[1], np.uint64)
    parts = np.linspace(0, len(tied), get_num_threads() + 1).astype(np.int64)
    lowest = 0
    highest = (1 << len(planes)) - 1
    step = 1
    votes = _guess(planes, quota / num_weights)
    while True:
        above, as_many = _compare(planes, votes, num_weights, pruned, tied, parts)
        if above.sum() > quota:
            lowest = votes + 1
            votes = votes + step
        elif above.sum() + as_many.sum() < quota:
            highest = votes - 1
            votes = votes - step
        else:
            break
        votes = votes if lowest <= votes <= highest else (lowest + highest) // 2
        step = 2 * step
    missing = quota - int(above.sum())
    if len(sizes) == 0:
        _prune_first(tied, pruned, missing)
    elif missing:
        _prune_smallest(tied, pruned, missing, sizes, as_many, parts)
    return pruned


def _guess(planes: Planes, share: float) -> int:
    """Return the highest vote count that the given fraction of a sample of weights reaches."""
    lines = planes[:, : planes.shape[1] // LINE_WORDS * LINE_WORDS].reshape(
        len(planes), -1, LINE_WORDS
    )
    sample = np.ascontiguousarray(lines[:, ::SAMPLE])
    votes = 0
    tied = np.full(sample.shape[1:], ALL)
    quota = share * sample[0].size * 64
    # Determine the threshold bit by bit, from the highest plane down.
    for plane in range(len(planes) - 1, -1, -1):
        found = tied & sample[plane]
        number = int(np.bitwise_count(found).sum())
        if number >= quota:
            votes = votes | 1 << plane
            tied = found
        else:
            quota = quota - number
            tied = tied ^ found
    return votes


@compiled(parallel=True)
def _compare(
    planes: Planes, votes: int, num_weights: int, pruned: Words, tied: Words, parts: Places
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compare all weights with a vote threshold.

    ``pruned`` gets the weights with more votes, ``tied`` those with exactly as many. The numbers of
    both are returned for each part of the words.
    """
    above = np.zeros(len(parts) - 1, np.int64)
    as_many = np.zeros(len(parts) - 1, np.int64)
    for part in prange(len(above)):
        for first in range(parts[part], parts[part + 1], TILE):
            stop = min(first + TILE, parts[part + 1])
            more, equal = _compare_tile(
                planes, votes, num_weights, pruned[first:stop], tied[first:stop], first
            )
            above[part] += more
            as_many[part] += equal
    return above, as_many


@compiled()
def _compare_tile(
    planes: Planes, votes: int, num_weights: int, more: Words, equal: Words, first: int
) -> tuple[int, int]:
    for word in range(len(equal)):
        more[word] = 0
        equal[word] = _weights_of(first + word, num_weights)
    # Compare the counts with ``votes`` bit by bit, from the highest plane down.
    for plane in range(len(planes) - 1, -1, -1):
        bits = planes[plane, first : first + len(equal)]
        if votes >> plane & 1:
            for word in range(len(equal)):
                equal[word] &= bits[word]
        else:
            for word in range(len(equal)):
                more[word] |= equal[word] & bits[word]
                equal[word] &= ~bits[word]
    above = 0
    as_many = 0
    for word in range(len(equal)):
        above += int(popcount(more[word]))
        as_many += int(popcount(equal[word]))
    return above, as_many


@compiled(inline="always")
def lower_bits(sizes: Sizes) -> np.int64:
    """Return the mask of a size's bits without the upper one."""
    return np.int64(0x7FFFFFFF) if sizes.itemsize == 4 else np.int64(0x7FFF)


@compiled(inline="always")
def _weights_of(word: int, num_weights: int) -> np.uint64:
    """Return a word in which the bits that belong to weights are set."""
    beyond = (word + 1) * 64 - num_weights
    if beyond <= 0:
        return ALL
    return ALL >> np.uint64(beyond) if beyond < 64 else np.uint64(0)


def _prune_smallest(
    tied: Words,
    pruned: Words,
    quota: int,
    sizes: Sizes,
    as_many: NDArray[np.int64],
    parts: NDArray[np.int64],
) -> None:
    """Prune the ``quota`` smallest of the tied weights.

    A histogram of the sizes finds the bin of the last pruned weight. All weights of lower bins are
    pruned, and only those of this bin are compared. If there are few ties, they are treated as one
    bin, so that their sizes, which are scattered in memory, are read once.
    """
    if as_many.sum() * FEW <= len(sizes):
        places = np.empty(as_many.sum(), np.int64)
        keys = np.empty(as_many.sum(), np.uint32)
        _set_aside(tied, sizes, np.concatenate(([0], np.cumsum(as_many))), places, keys, parts)
        _prune_rest(pruned, places, keys, quota)
        return
    # The upper 15 of the bits that count.
    shift = 8 * sizes.itemsize - 16
    counts = _count_sizes(tied, sizes, shift, parts)
    below = np.cumsum(counts.sum(axis=0))
    digit = int(np.searchsorted(below, quota))
    starts = np.concatenate(([0], np.cumsum(counts[:, digit])))
    places = np.empty(starts[-1], np.int64)
    keys = np.empty(starts[-1], np.uint32)
    _prune_below(tied, pruned, sizes, shift, digit, starts, places, keys, parts)
    _prune_rest(pruned, places, keys, quota - (int(below[digit - 1]) if digit else 0))


@compiled(parallel=True)
def _set_aside(
    tied: Words, sizes: Sizes, starts: Places, places: Places, keys: Keys, parts: Places
) -> None:
    """Write the indices of the tied weights, in order, and their sizes.

    There are two loops, so that many memory reads are in flight at the same time.
    """
    low = lower_bits(sizes)
    up = 32 - 8 * sizes.itemsize
    for part in prange(len(parts) - 1):
        found = starts[part]
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                places[found] = word * 64 + np.int64(lowest_bit(rest))
                rest &= rest - ONE
                found += 1
        for tie in range(starts[part], starts[part + 1]):
            keys[tie] = (np.int64(sizes[places[tie]]) & low) << up


@compiled(parallel=True)
def _count_sizes(
    tied: Words, sizes: Sizes, shift: int, parts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return a histogram of the tied weights' sizes for each part of the words.

    The lower ``shift`` bits of the sizes are dropped.
    """
    low = lower_bits(sizes)
    counts = np.zeros((len(parts) - 1, 1 << 15), np.int64)
    for part in prange(len(counts)):
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                place = word * 64 + int(lowest_bit(rest))
                rest &= rest - ONE
                counts[part, (np.int64(sizes[place]) & low) >> shift] += 1
    return counts


@compiled(parallel=True)
def _prune_below(
    tied: Words,
    pruned: Words,
    sizes: Sizes,
    shift: int,
    digit: int,
    starts: Places,
    places: Places,
    keys: Keys,
    parts: Places,
) -> None:
    """Prune the tied weights with sizes below a bin, and copy those in the bin, in order."""
    low = lower_bits(sizes)
    below = (1 << shift) - 1
    for part in prange(len(parts) - 1):
        found = starts[part]
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                lowest = lowest_bit(rest)
                place = word * 64 + np.int64(lowest)
                rest &= rest - ONE
                size = np.int64(sizes[place]) & low
                if size >> shift < digit:
                    pruned[word] |= ONE << lowest
                elif size >> shift == digit:
                    places[found] = place
                    keys[found] = size & below
                    found += 1


@compiled()
def _prune_rest(pruned: Words, places: Places, keys: Keys, quota: int) -> None:
    """Prune the ``quota`` smallest of some weights."""
    threshold, ties = threshold_of(keys, quota, np.empty_like(keys))
    for found in range(len(keys)):
        # Arithmetic instead of a branch, which would be mispredicted half of the time.
        chosen = np.uint64(keys[found] < threshold)
        if keys[found] == threshold and ties > 0:
            chosen = ONE
            ties -= 1
        pruned[places[found] >> 6] |= chosen << np.uint64(places[found] & 63)


@compiled()
def _prune_first(tied: Words, pruned: Words, quota: int) -> None:
    """Prune the first ``quota`` of the tied weights."""
    for word in range(len(tied)):
        rest = tied[word]
        if quota >= popcount(rest):
            pruned[word] |= rest
            quota -= int(popcount(rest))
            continue
        while quota > 0:
            lowest = rest & (~rest + ONE)
            pruned[word] |= lowest
            rest ^= lowest
            quota -= 1
        return


@compiled(parallel=True)
def most_voted_in_lines(
    counts: NDArray[np.uint16], sizes: Sizes, quota: int, threads: int
) -> NDArray[np.bool_]:
    """Return True for the ``quota`` most voted weights of each line: bool, (lines, size).

    Parameters
    ----------
    counts : (lines, size), votes per weight
    sizes : (lines, size), or (0, 0)
    quota : at least 1
    """
    lines, size = counts.shape
    low = lower_bits(sizes)
    prune_mask = np.empty((lines, size), np.bool_)
    most = int(counts.max())
    for thread in prange(threads):
        histogram = np.zeros(most + 1, np.int64)
        keys = np.zeros(size, np.uint32)
        scratch = np.empty(size, np.uint32)
        for line in range(lines * thread // threads, lines * (thread + 1) // threads):
            histogram[:] = 0
            for place in range(size):
                histogram[counts[line, place]] += 1
            votes = most
            missing = quota
            while histogram[votes] < missing:
                missing -= histogram[votes]
                votes -= 1
            tied = 0
            for place in range(size):
                if counts[line, place] == votes:
                    if len(sizes):
                        keys[tied] = np.int64(sizes[line, place]) & low
                    tied += 1
            threshold, ties = threshold_of(keys[:tied], missing, scratch)
            tied = 0
            for place in range(size):
                chosen = counts[line, place] > votes
                if counts[line, place] == votes:
                    chosen = keys[tied] < threshold
                    if keys[tied] == threshold and ties > 0:
                        chosen = True
                        ties -= 1
                    tied += 1
                prune_mask[line, place] = chosen
    return prune_mask


@compiled(parallel=True)
def most_voted_in_pattern(
    counts: NDArray[np.uint16], sizes: Sizes, quota: int
) -> NDArray[np.bool_]:
    """Return what ``most_voted_in_lines`` does, for lines of a few weights."""
    lines, size = counts.shape
    low = lower_bits(sizes)
    prune_mask = np.empty((lines, size), np.bool_)
    for line in prange(lines):
        for place in range(size):
            before = 0
            for other in range(size):
                more = np.int64(counts[line, other]) - np.int64(counts[line, place])
                if more == 0 and len(sizes):
                    more = (np.int64(sizes[line, place]) & low) - (
                        np.int64(sizes[line, other]) & low
                    )
                before += more > 0 or (more == 0 and other < place)
            prune_mask[line, place] = before < quota
    return prune_mask
