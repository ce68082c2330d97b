"""Tokens of long texts, encoded piece by piece so that memory stays bounded.

The text consists of passages that are joined by blank lines, or of consecutive parts of a file. The
pieces must yield the tokens of the whole text. The text is therefore cut between two passages, at
places where the tokens of the text before the cut are a prefix of the tokens of that text with its
continuation. Blanks at the cut can belong to either side. Each piece is encoded behind the end of
the previous piece, its context, and the context's tokens are dropped. In this way a token that
would cross the cut is detected, and tokens that the tokenizer adds before every text do no harm. A
place that fails the check is skipped, and a text that cannot be cut is encoded whole.

The method assumes that a tokenizer looks at a few words of context only. This holds for tokenizers
that first split a text into words, and for those whose tokens do not join words across lines.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.progress import PercentDone, report_progress, with_progress

Encode = Callable[[str], Sequence[int]]
"""Tokenizer: a function from text to token ids."""

PIECE_CHARACTERS = 1 << 19
"""Minimum number of characters of a piece; a shorter text is a single piece."""
CONTEXT_CHARACTERS = 256
"""Minimum number of characters of a context, which consists of whole passages."""
LONGEST_CONTEXT = 4096
"""Maximum number of characters that are compared before and after a cut."""
MAX_FAILURES = 16
"""Number of consecutive failed cuts after which the rest of the text is one piece."""
BETWEEN = "\n\n"
MAX_MOVED = len(BETWEEN)
"""Maximum number of blanks before a cut that can move to the text after it."""
IN_MEMORY = 1 << 24
"""Number of tokens from which the tokens of a text are stored in a file."""

Tokens = NDArray[np.int64]


@runtime_checkable
class Remembering(Protocol):
    """Passages that can store computed values; see ``Indexed``."""

    def load(self, name: str) -> Any:
        """Return the stored value, or None."""

    def keep(self, name: str, value: Any) -> None:
        """Store a value."""


@dataclass(frozen=True)
class Piece:
    """Passages that are encoded together."""

    first: int
    """Index of the first passage."""
    context: int
    """Index of the passage at which the context begins."""
    moved: int
    """Number of characters before the first passage that belong to this piece."""
    start: int
    """Index of the first token within the whole text."""


class TokenPieces:
    """Tokens of joined passages.

    Parameters
    ----------
    passages : at least one passage; they are read again for every piece
    encode : tokenizer; tokens that it adds before and after a text occur once, around the whole
        text
    between : separator of two passages: a blank line, or nothing for consecutive parts of a text
    piece_characters : minimum number of characters of a piece, on which the tokens do not depend;
        0: ``PIECE_CHARACTERS``
    """

    def __init__(
        self,
        passages: Sequence[str],
        encode: Encode,
        between: str = BETWEEN,
        piece_characters: int = 0,
    ) -> None:
        self.passages = passages
        self.encode = encode
        self.between = between
        self.piece_characters = piece_characters or PIECE_CHARACTERS
        self._last: tuple[int, Tokens] = (-1, np.empty(0, np.int64))
        name = f"pieces-{of_encoder}" if (of_encoder := identity_of(encode)) else ""
        if name and piece_characters:
            name = f"{name}-{piece_characters}"
        # Another tokenizer or another size of the pieces cuts elsewhere, hence the name.
        counted = passages.load(name) if name and isinstance(passages, Remembering) else None
        if counted is None:
            counted = self._counted()
            if name and isinstance(passages, Remembering):
                passages.keep(name, counted)
        self.pieces = [Piece(*numbers) for numbers in counted["pieces"]]
        self._num_tokens = int(counted["tokens"])

    def __len__(self) -> int:
        return self._num_tokens

    def spans(self, starts: Sequence[int], length: int) -> Tensor:
        """Return ``length`` tokens from each start: (places, length), int64."""
        samples = torch.empty(len(starts), length, dtype=torch.int64)
        firsts = [piece.start for piece in self.pieces]
        # In ascending order, so that each piece is encoded once.
        for place in with_progress(
            sorted(range(len(starts)), key=lambda place: starts[place]), "encoding samples"
        ):
            begin = starts[place]
            end = starts[place] + length
            number = int(np.searchsorted(firsts, begin, side="right")) - 1
            parts = []
            while begin < end:
                tokens = self._tokens(number)
                part = tokens[begin - firsts[number] : end - firsts[number]]
                parts.append(part)
                begin = begin + len(part)
                number = number + 1
            samples[place] = torch.from_numpy(np.concatenate(parts))
        return samples

    def all(self, folder: Callable[[], Path] | None = None) -> Tensor:
        """Return all tokens, int64.

        From ``IN_MEMORY`` tokens on they are in an unnamed file in the folder that ``folder``
        makes, which is removed with the tensor.
        """
        tokens: Tokens = (
            np.empty(len(self), np.int64) if len(self) < IN_MEMORY else _in_file(len(self), folder)
        )
        percent = PercentDone("encoding", len(self))
        for number, piece in enumerate(self.pieces):
            percent(piece.start)
            part = self._tokens(number)
            tokens[piece.start : piece.start + len(part)] = part
        return torch.from_numpy(tokens)

    def _tokens(self, number: int) -> Tokens:
        """Return the tokens of one piece."""
        if self._last[0] != number:
            piece = self.pieces[number]
            last = number + 1 == len(self.pieces)
            following = None if last else self.pieces[number + 1]
            # The context's passages too, which are encoded again.
            passages = list(
                self.passages[piece.context : None if following is None else following.first]
            )
            # Number of passages of the context.
            split = piece.first - piece.context
            before = self._before(passages[:split])
            context = before[: len(before) - piece.moved]
            text = self._text(before[len(context) :], passages[split:], following)
            opened = _Open(
                context,
                _encoded(self.encode, context, self._ending or ()) if context else [],
                "",
                piece,
            )
            tokens = self._behind(opened, text, () if last else self._ending or ()) or []
            self._last = number, np.array(tokens, dtype=np.int64)
            expected = (len(self) if following is None else following.start) - piece.start
            if len(self._last[1]) != expected:
                raise RuntimeError(
                    f"piece {number} of a text has {len(self._last[1])} tokens, but {expected}"
                    " were counted"
                )
        return self._last[1]

    @cached_property
    def _ending(self) -> tuple[int, ...] | None:
        return special_ending(self.encode)

    def _counted(self) -> dict[str, Any]:
        """Cut the text into pieces and count its tokens."""
        open_piece = _Open("", [], "", Piece(0, 0, 0, 0))
        pieces = list[Piece]()
        body = list[str]()
        size = 0
        failures = 0
        percent = PercentDone("tokenising", len(self.passages))
        for number, passage in enumerate(self.passages):
            if size >= self.piece_characters and failures < MAX_FAILURES:
                following = self._cut(open_piece, body, passage, number)
                failures = 0 if following else failures + 1
                percent(number)
                if following:
                    pieces.append(open_piece.piece)
                    open_piece = following
                    body = []
                    size = 0
            body.append(passage)
            size += len(passage) + len(self.between)
        pieces.append(open_piece.piece)
        tokens = self._behind(open_piece, self._text(open_piece.moved, body, None), ())
        # The last piece does not fit its context, so the text is encoded whole.
        if tokens is None:
            report_progress("tokenising a text that cannot be split")
            pieces = [Piece(0, 0, 0, 0)]
            tokens = list(self.encode(self.between.join(self.passages)))
        self._last = len(pieces) - 1, np.array(tokens, dtype=np.int64)
        return {
            "tokens": pieces[-1].start + len(tokens),
            "pieces": [astuple(piece) for piece in pieces],
        }

    def _cut(
        self, open_piece: "_Open", body: list[str], passage: str, number: int
    ) -> "_Open | None":
        """End the open piece after ``body`` and begin one with ``passage``; None if that fails."""
        if (ending := self._ending) is None:
            return None
        context = _context_of(body)
        before = self._before(body[len(body) - context :])
        blanks = len(before) - len(before.rstrip())
        # The blanks at the cut may belong to either side; the first division that works is taken.
        for moved in range(min(blanks, MAX_MOVED) + 1):
            stem = before[: len(before) - moved]
            rest = before[len(before) - moved :]
            alone = _encoded(self.encode, stem, ending)
            together = _encoded(self.encode, before + passage[:LONGEST_CONTEXT], ending)
            # The stem's tokens must not change with what follows them.
            if not alone or together[: len(alone)] != alone:
                continue
            piece = Piece(number, number - context, moved, 0)
            tokens = self._behind(open_piece, self._text(open_piece.moved, body, piece), ending)
            # The piece must end with the last tokens of the next one's context, else counts differ.
            end = alone[len(alone) // 2 :]
            if tokens is not None and tokens[-len(end) :] == end:
                return _Open(
                    stem, alone, rest, replace(piece, start=open_piece.piece.start + len(tokens))
                )
        return None

    def _before(self, passages: Sequence[str]) -> str:
        """Return the end of some passages with the separator; empty if there are no passages."""
        return (self.between.join(passages)[-LONGEST_CONTEXT:] + self.between) if passages else ""

    def _text(self, moved: str, passages: Sequence[str], following: Piece | None) -> str:
        """Return the text of a piece, up to the characters that belong to the following piece.

        Parameters
        ----------
        moved : characters before the first passage that belong to this piece
        passages : the passages of the piece
        following : the next piece, or None for the last piece
        """
        if following is None:
            return moved + self.between.join(passages)
        text = moved + self.between.join(passages) + self.between
        return text[: len(text) - following.moved]

    def _behind(self, piece: "_Open", text: str, ending: tuple[int, ...]) -> list[int] | None:
        """Return a piece's tokens without its context's; None if the context's tokens changed."""
        tokens = _encoded(self.encode, piece.context + text, ending)
        return tokens[len(piece.tokens) :] if tokens[: len(piece.tokens)] == piece.tokens else None


@dataclass(frozen=True)
class _Open:
    """Piece that has no end yet."""

    context: str
    tokens: list[int]
    """Tokens of the context."""
    moved: str
    """Characters between the context and the piece's first passage."""
    piece: Piece


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both sequences begin."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def special_ending(encode: Encode) -> tuple[int, ...] | None:
    """Return the tokens that a tokenizer adds after every text; None if they are uncertain."""
    nothing = list(encode(""))
    something = list(encode("a"))
    ending = nothing[common_beginning(nothing, something) :]
    if len(something) <= len(nothing) or something[len(something) - len(ending) :] != ending:
        return None
    return tuple(ending)


def identity_of(encode: Encode) -> str:
    """Return a hash that identifies a model's tokenizer across processes.

    The hash is empty for other functions.
    """
    return str(getattr(getattr(encode, "__self__", None), "tokenizer_sha256", ""))


def _encoded(encode: Encode, text: str, ending: tuple[int, ...]) -> list[int]:
    """Return the tokens of a text without those that the tokenizer adds after it."""
    tokens = list(encode(text))
    return tokens[: len(tokens) - len(ending)]


def _context_of(passages: Sequence[str]) -> int:
    """Return how many of the last passages form a context."""
    size = 0
    for number, passage in enumerate(reversed(passages), start=1):
        size += len(passage)
        if size >= CONTEXT_CHARACTERS:
            return number
    return len(passages)


def _in_file(number: int, folder: Callable[[], Path] | None) -> Tokens:
    """Return an array of ``number`` tokens that is mapped from an unnamed file of this process."""
    # The array keeps the file, which has no name, until it is freed.
    with tempfile.TemporaryFile(dir=folder and folder()) as file:
        return np.memmap(file, dtype=np.int64, mode="w+", shape=(number,))
