"""Limits on how much one client counts: every number that weighs a client in a result goes through ``count_claims``.

Covers: a client that claims a billion sequences, tokens or windows, sends scores that are a million times as large as the
others', or says that it computes a billion times as fast.
Does not cover: what a client does with the weight that is left to it (``update_limits.py``); several clients together; runs of
one or two clients, in which there is nobody to outvote one.
"""

from collections.abc import Mapping
from itertools import accumulate
from statistics import median_low

from espalier.settings.mistakes import Mistake
from strategies.engine.rounds import Rounds


def up_to_median(claimed: Mapping[int, float], most_ratio: float) -> dict[int, float]:
    """Limit each claim to ``most_ratio`` times the median claim.

    Parameters
    ----------
    claimed : by client, 0 or more
    most_ratio : 1 or more

    Returns
    -------
    dict
        The same, where nothing is above; the median is that of the claims above 0, of an even number the lower of the two in
        the middle, so that one of two clients cannot raise it.
    """
    positive = [value for value in claimed.values() if value > 0]
    if not positive:
        return dict(claimed)
    most = most_ratio * median_low(positive)
    return {client: min(value, most) for client, value in claimed.items()}


def limited_weights(claimed: Mapping[int, float], most_ratio: float) -> dict[int, float]:
    """Limit each claim to ``most_ratio`` times the median claim, and to as many times the mean of what then counts.

    With the second limit no client has more than ``most_ratio / n`` of the weight of n clients, however uneven they are: with
    the default ratio of 2 at most 25% of eight. A ratio of 1 gives all clients the weight of the smallest.

    Parameters
    ----------
    claimed : by client, 0 or more; a client of weight 0 is none of the n
    most_ratio : 1 or more

    Returns
    -------
    dict
        The same numbers, bit by bit, where no claim is above a limit.
    """
    counted = up_to_median(claimed, most_ratio)
    falling = sorted((value for value in counted.values() if value > 0), reverse=True)
    if not falling or falling[0] <= most_ratio * (sum(falling) / len(falling)):
        return counted
    most = falling[-1]
    number = len(falling)
    # Of each weight and all smaller ones, without cancellation.
    sums = list(accumulate(reversed(falling)))[::-1]
    for above, (value, rest) in enumerate(zip(falling, sums, strict=True)):
        # if the first ``above`` clients count ``limit`` each: limit = ratio * (above * limit + rest) / number
        if (room := number - most_ratio * above) <= 0:
            break
        if (limit := most_ratio * rest / room) >= value:
            most = limit
            break
    return {client: min(value, most) for client, value in counted.items()}


def counted_capabilities(rounds: Rounds, otherwise: str) -> dict[int, float]:
    """Return what each client can compute, dropped ones included, as the nodes say, each up to a multiple of the median's.

    ``otherwise`` is what the operator can do beside setting ``capability`` on the nodes.

    Raises
    ------
    Mistake
        Some sites measured their capability, and some state it.
    """
    seats = [seat for _, seat in sorted(rounds.roster.seats.items())]
    measured = [seat.site for seat in seats if seat.measured]
    if measured and len(measured) < len(seats):
        raise Mistake(
            f"capability: {', '.join(measured)} measured its own, others state theirs, and the two"
            f" cannot be compared; set it on every node or to 0 on every node, or set {otherwise}"
        )
    stated = {seat.client: seat.capability for seat in seats}
    counted = up_to_median(stated, rounds.settings.federation.max_capability_ratio)
    note_claims(rounds, "capability", stated, counted)
    return counted


def count_claims(
    rounds: Rounds, what: str, claimed: Mapping[int, float], most_ratio: float
) -> dict[int, float]:
    """Return what counts of what each client claims; whose claim is limited is told, and noted on its seat for the summary.

    Parameters
    ----------
    what : ``weight``, ``tokens``, ``scores`` and so on, for people
    claimed, most_ratio : as of ``limited_weights``
    """
    counted = limited_weights(claimed, most_ratio)
    for client in note_claims(rounds, what, claimed, counted):
        note = rounds.roster.seats[client].capped[what]
        note["times"] = note.get("times", 0) + 1
    return counted


def note_claims(
    rounds: Rounds, what: str, claimed: Mapping[int, float], counted: Mapping[int, float]
) -> list[int]:
    """Note on the seats whose claim counts less than it says, tell it where it is new, and return those clients."""
    limited = [client for client, value in claimed.items() if counted[client] != value]
    for client in limited:
        seat = rounds.roster.seats[client]
        note = {"claimed": claimed[client], "counted": counted[client]}
        before = seat.capped.get(what, {})
        seat.capped[what] = {**before, **note}
        if seat.capped[what] != before:
            text = (
                f"capped       {seat.site}: its {what} {note['claimed']:g} counts as"
                f" {note['counted']:g}"
            )
            rounds.progress.note("capped", text, client=client, site=seat.site, what=what, **note)
    return limited
