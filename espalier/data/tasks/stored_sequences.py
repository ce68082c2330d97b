"""Training sequences whose token ids are in one array, so that memory stays bounded.

Each token takes four bytes. Many tokens are in an unnamed file, which the system removes with the
process.
"""

import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from espalier.data.tasks.encoding import Encoded, Marked

IN_MEMORY = 1 << 24
"""Number of tokens that are kept in memory; with more, all are in a file."""


class StoredSequences(Sequence[Marked]):
    """Training sequences that are not packed.

    Parameters
    ----------
    sequences : read once
    folder : function that makes the folder of the unnamed file; it is called only if there is one
    """

    def __init__(self, sequences: Iterable[Encoded | Marked], folder: Callable[[], Path]) -> None:
        # Place behind the last token, and behind the last pair of a span, of each sequence.
        self._ends = array("q", [0])
        self._span_ends = array("q", [0])
        self._spans = array("i")
        # Number of the item of each sequence; -1: it is the sequence's own number.
        self._items = array("q")
        self._tokens = self._stored(sequences, folder)

    def _stored(
        self, sequences: Iterable[Encoded | Marked], folder: Callable[[], Path]
    ) -> NDArray[np.int32]:
        """Store all sequences; return their token ids, (tokens,)."""
        waiting = array("i")
        file: IO[bytes] | None = None
        for sequence in sequences:
            waiting.extend(sequence.token_ids)
            self._ends.append(self._ends[-1] + len(sequence.token_ids))
            for span in sequence.spans:
                self._spans.extend(span)
            self._span_ends.append(len(self._spans) // 2)
            (item,) = sequence.items or (-1,)
            self._items.append(item)
            if len(waiting) > IN_MEMORY:
                # The array below keeps the file, which has no name, until it is freed.
                file = file or tempfile.TemporaryFile(dir=folder())  # noqa: SIM115
                waiting.tofile(file)
                waiting = array("i")
        if file is None:
            return np.array(waiting, np.int32)
        with file:
            waiting.tofile(file)
            file.flush()
            return np.memmap(file, np.int32, "r")

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: Any) -> Any:
        """Return one sequence, or a list of the sequences of a slice."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        first, end = self._ends[number : number + 2]
        begin, behind = self._span_ends[number : number + 2]
        spans = self._spans[2 * begin : 2 * behind]
        item = self._items[number]
        return Marked(
            tuple(self._tokens[first:end].tolist()),
            tuple(zip(spans[::2], spans[1::2], strict=True)),
            items=() if item < 0 else (item,),
        )
