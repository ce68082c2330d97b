"""Limits on the weight of one client.

``count_claims`` handles every number by which a client's contribution is weighted.

Covers: a client that claims a billion sequences or tokens, sends scores a million times as large as
those of the others, or claims to compute a billion times as fast.
Does not cover: the values that a client sends under its remaining weight (``updates.py``);
several clients that work together; runs of one or two clients, in which no majority exists.
"""

from collections.abc import Mapping
from itertools import accumulate
from statistics import median_low

from espalier.errors import InputError
from strategies.base.rounds import Rounds

MAX_CAPABILITY_RATIO = 4.0
"""Maximum capability of a node as a multiple of the median capability."""


def up_to_median(claimed: Mapping[int, float], max_ratio: float) -> dict[int, float]:
    """Limit each claim (0 or more) to ``max_ratio`` times the median claim.

    The median is that of the positive claims; of an even number it is the lower middle value, so
    that one of two clients cannot raise it.
    """
    # Claims of 0 would pull the median down to 0.
    positive = [value for value in claimed.values() if value > 0]
    if not positive:
        return dict(claimed)
    limit = max_ratio * median_low(positive)
    return {client: min(value, limit) for client, value in claimed.items()}


def limited_weights(claimed: Mapping[int, float], max_ratio: float) -> dict[int, float]:
    """Limit each claim to ``max_ratio`` times the median, then to that multiple of the mean.

    The second limit refers to the mean of the limited claims. It gives no client more than
    ``max_ratio / n`` of the weight of n clients, however unequal they are: at most 25% of eight
    clients with the default ratio of 2. A ratio of 1 gives all clients the weight of the smallest.
    Claims are 0 or more, and clients of weight 0 are not among the n. The claims are unchanged bit
    by bit if none exceeds a limit.
    """
    counted = up_to_median(claimed, max_ratio)
    falling = sorted((value for value in counted.values() if value > 0), reverse=True)
    if not falling or falling[0] <= max_ratio * (sum(falling) / len(falling)):
        return counted
    # Fallback of the loop: with a ratio of 1 all count as the smallest.
    max_weight = falling[-1]
    number = len(falling)
    # Suffix sums: each weight plus all smaller ones. Subtracting from the total would cancel
    # digits.
    sums = list(accumulate(reversed(falling)))[::-1]
    # Find how many of the largest are limited: the first place at which the limit exceeds the rest.
    for above, (value, rest) in enumerate(zip(falling, sums, strict=True)):
        # If the first ``above`` clients count ``limit`` each, the limit solves
        # limit = ratio * (above * limit + rest) / number.
        if (room := number - max_ratio * above) <= 0:
            break
        if (limit := max_ratio * rest / room) >= value:
            max_weight = limit
            break
    return {client: min(value, max_weight) for client, value in counted.items()}


def counted_capabilities(rounds: Rounds, otherwise: str) -> dict[int, float]:
    """Return the capability of each client, dropped ones included, limited relative to the median.

    Raises InputError if some sites measured their capability and others state theirs, so that the
    numbers cannot be compared; ``otherwise`` is the setting that the operator can use instead.
    """
    seats = [seat for _, seat in sorted(rounds.roster.seats.items())]
    measured = [seat.site for seat in seats if seat.measured]
    # A mixture is not comparable: a measured speed and a stated one have different units.
    if measured and len(measured) < len(seats):
        raise InputError(
            f"capability: {', '.join(measured)} measured its own, others state theirs, and the two"
            f" cannot be compared; set it on every node or to 0 on every node, or set {otherwise}"
        )
    stated = {seat.client: seat.capability for seat in seats}
    counted = up_to_median(stated, MAX_CAPABILITY_RATIO)
    note_claims(rounds, "capability", stated, counted)
    return counted


def count_claims(rounds: Rounds, what: str, claimed: Mapping[int, float]) -> dict[int, float]:
    """Return the counted part of each client's claim, by ``federation.max-weight-ratio``.

    Each limited client gets a progress line and a note on its seat, for the summary. ``what`` is
    the kind of the claim, such as ``weight``, ``tokens`` or ``scores``; see ``limited_weights``.
    """
    counted = limited_weights(claimed, rounds.settings.federation.weight_limit)
    for client in note_claims(rounds, what, claimed, counted):
        note = rounds.roster.seats[client].capped[what]
        note["times"] = note.get("times", 0) + 1
    return counted


def count_sizes(rounds: Rounds, what: str, sizes: Mapping[int, float]) -> dict[int, float]:
    """Return the factor with which each client's numbers count, whose sum is its claim."""
    counted = count_claims(rounds, what, sizes)
    # A client without numbers has nothing to scale.
    return {client: counted[client] / size if size else 1.0 for client, size in sizes.items()}


def note_claims(
    rounds: Rounds, what: str, claimed: Mapping[int, float], counted: Mapping[int, float]
) -> list[int]:
    """Record limited claims on the seats, show new ones, and return the limited clients."""
    limited = [client for client, value in claimed.items() if counted[client] != value]
    for client in limited:
        seat = rounds.roster.seats[client]
        note = {"claimed": claimed[client], "counted": counted[client]}
        before = seat.capped.get(what, {})
        # The count of earlier rounds stays.
        seat.capped[what] = {**before, **note}
        if seat.capped[what] != before:
            text = (
                f"capped       {seat.site}: its {what} {note['claimed']:g} counts as"
                f" {note['counted']:g}"
            )
            rounds.progress.note("capped", text, client=client, site=seat.site, what=what, **note)
    return limited
