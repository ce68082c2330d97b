"""Packing: several training sequences in one row, each of which attends only to itself."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

from espalier.data.tasks.encoding import Encoded, Marked


class PackedSequences(Sequence[Marked]):
    """Rows of several training sequences, which are joined on access.

    The longest sequences come first, and each goes into the row with the least room that is enough
    (best-fit decreasing). The first token of a record has no loss, because it would be predicted
    from another record.

    Parameters
    ----------
    sequences : none is longer than ``max_tokens``
    max_tokens : maximum number of tokens of a row
    """

    def __init__(self, sequences: Sequence[Encoded | Marked], max_tokens: int) -> None:
        self._sequences = sequences
        self._rows = _fitted([len(sequence.token_ids) for sequence in sequences], max_tokens)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        """Return one row, or a list of the rows of a slice."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return _joined([(number, self._sequences[number]) for number in self._rows[place]])


def _fitted(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the numbers of the sequences of each row."""
    # Free tokens and number of each row, sorted.
    rooms: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        # The first row with enough room is the one with the least.
        index = bisect_left(rooms, (length, 0))
        if index < len(rooms):
            room, row = rooms.pop(index)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(number)
        insort(rooms, (room - length, row))
    return rows


def _joined(numbered: Sequence[tuple[int, Encoded | Marked]]) -> Marked:
    """Return one row with the tokens of some sequences, given with their numbers."""
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    items: list[int] = []
    for number, sequence in numbered:
        offset = len(token_ids)
        spans += [
            (offset + max(start, 1), offset + end)
            for start, end in sequence.spans
            if end > max(start, 1)
        ]
        token_ids += sequence.token_ids
        items += sequence.items or (number,)
    lengths = tuple(len(sequence.token_ids) for _, sequence in numbered)
    return Marked(tuple(token_ids), tuple(spans), lengths, tuple(items))
