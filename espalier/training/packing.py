"""Packing: several training sequences in one row, each of which attends only to itself."""

from bisect import bisect_left, insort
from collections.abc import Sequence

from espalier.data.tasks.encoding import Encoded, Marked


def packed(sequences: Sequence[Encoded | Marked], max_tokens: int) -> list[Marked]:
    """Join sequences to rows of at most ``max_tokens`` tokens.

    The longest sequences come first, and each goes into the row with the least room that is enough
    (best-fit decreasing). The first token of a record has no loss, because it would be predicted
    from another record.

    Parameters
    ----------
    sequences : none is longer than ``max_tokens``
    """
    # Free tokens and number of each row, sorted.
    rows: list[list[Marked]] = []
    rooms: list[tuple[int, int]] = []
    numbered = (
        Marked(one.token_ids, one.spans, items=one.items or (number,))
        for number, one in enumerate(sequences)
    )
    for one in sorted(numbered, key=lambda one: -len(one.token_ids)):
        length = len(one.token_ids)
        # The first row with enough room is the one with the least.
        place = bisect_left(rooms, (length, 0))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(one)
        insort(rooms, (room - length, row))
    return [_joined(row) for row in rows]


def _joined(sequences: Sequence[Marked]) -> Marked:
    """Return one row with the tokens of some sequences."""
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for one in sequences:
        before = len(token_ids)
        spans += [
            (before + max(start, 1), before + end)
            for start, end in one.spans
            if end > max(start, 1)
        ]
        token_ids += one.token_ids
    lengths = tuple(len(one.token_ids) for one in sequences)
    items = tuple(item for one in sequences for item in one.items)
    return Marked(tuple(token_ids), tuple(spans), lengths, items)
