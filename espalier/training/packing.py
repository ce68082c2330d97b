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
        Marked(sequence.token_ids, sequence.spans, items=sequence.items or (number,))
        for number, sequence in enumerate(sequences)
    )
    for sequence in sorted(numbered, key=lambda sequence: -len(sequence.token_ids)):
        length = len(sequence.token_ids)
        # The first row with enough room is the one with the least.
        index = bisect_left(rooms, (length, 0))
        if index < len(rooms):
            room, row = rooms.pop(index)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(sequence)
        insort(rooms, (room - length, row))
    return [_joined(row) for row in rows]


def _joined(sequences: Sequence[Marked]) -> Marked:
    """Return one row with the tokens of some sequences."""
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for sequence in sequences:
        offset = len(token_ids)
        spans += [
            (offset + max(start, 1), offset + end)
            for start, end in sequence.spans
            if end > max(start, 1)
        ]
        token_ids += sequence.token_ids
    lengths = tuple(len(sequence.token_ids) for sequence in sequences)
    items = tuple(item for sequence in sequences for item in sequence.items)
    return Marked(tuple(token_ids), tuple(spans), lengths, items)
