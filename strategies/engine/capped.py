"""How much one client can claim: its capability, and its weight in a mean, at most so many times those of the median client.

Covers: a client that says it has a billion sequences, or sends an update of a huge norm, and so cancels the others; one that
says it computes a billion times as fast, and so leaves the others one layer, or rank 1. Half of the clients would have to agree
to move the median.
Does not cover: a client that claims what the cap allows, or several that do.
"""

from collections.abc import Mapping
from statistics import median_low

from espalier.settings.mistakes import Mistake
from strategies.engine.rounds import Rounds


def capped(claimed: Mapping[int, float], most_ratio: float) -> dict[int, float]:
    """What counts of what each client claims: at most ``most_ratio`` times the median.

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


def counted_capabilities(rounds: Rounds, otherwise: str) -> dict[int, float]:
    """What each client can compute, dropped ones included, as the nodes say, each up to a multiple of the median's.

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
            f"capability: {', '.join(measured)} measured its own, others state theirs, and the two cannot be compared; "
            f"set it on every node or to 0 on every node, or set {otherwise}"
        )
    stated = {seat.client: seat.capability for seat in seats}
    return count_claims(rounds, "capability", stated, rounds.settings.federation.max_capability_ratio)


def count_claims(rounds: Rounds, what: str, claimed: Mapping[int, float], most_ratio: float) -> dict[int, float]:
    """What counts of what each client claims; whose claim is cut is told, and noted on its seat for the summary.

    Parameters
    ----------
    what : ``capability`` or ``weight``
    claimed, most_ratio : as of ``capped``
    """
    counted = capped(claimed, most_ratio)
    for client, value in claimed.items():
        if counted[client] == value:
            continue
        seat, note = rounds.roster.seats[client], {"claimed": value, "counted": counted[client]}
        if seat.capped.get(what) != note:
            seat.capped[what] = note
            text = (
                f"capped       {seat.site}: its {what} {value:g} counts as {counted[client]:g}, {most_ratio:g} times the median"
            )
            rounds.progress.note("capped", text, client=client, site=seat.site, what=what, **note)
    return counted
