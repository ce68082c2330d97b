"""The tokens of passages joined by blank lines, or of a text in stretches, of which a piece is in memory at a time.

The pieces must have the tokens of the whole text. It is cut between two passages, where encoding the end of what stands before
the cut gives the first tokens of encoding that end together with what follows; blanks between them may go to either side. Each
piece is then encoded behind such an end, whose tokens are left out. So a token that would reach over the cut is noticed, and
one that a tokenizer sets before every text does no harm. A place that fails is passed over; a text that cannot be cut is
encoded whole.

This rests on tokenizers that look no further than a few words, as those do which split a text into words first, and those
whose tokens do not join words across lines.
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

from espalier.pace.beats import Share, beat, in_shares

Encode = Callable[[str], Sequence[int]]
"""A tokenizer: text to token ids."""

PIECE_CHARACTERS = 1 << 19
"""A piece ends with the first passage after which it has so many, and can be cut; a shorter text is one piece."""
CONTEXT_CHARACTERS = 256
"""Before a piece stand the last passages of the one before it, until they have so many."""
LONGEST_CONTEXT = 4096
"""Of a context, and of what follows a cut, no more characters are looked at."""
MOST_FAILURES = 16
"""A text that cannot be cut at so many places, one after the other, is not cut there or behind."""
BETWEEN = "\n\n"
MOST_MOVED = 2
"""Blanks at the end of what stands before a cut that may go to what follows it."""
IN_MEMORY = 1 << 24
"""Of a text with more tokens, all together are kept in a file."""

Tokens = NDArray[np.int64]


@runtime_checkable
class Remembering(Protocol):
    """Passages of which numbers can be kept; see ``IndexedPassages``."""

    def load(self, name: str) -> Any:
        """What was kept, or None."""

    def keep(self, name: str, value: Any) -> None:
        """Keep it."""


@dataclass(frozen=True)
class Piece:
    """Passages that are encoded together."""

    first: int
    """Its first passage."""
    context: int
    """The passage with which its context begins."""
    moved: int
    """How many characters that stand before its first passage belong to it, and not to the piece before."""
    start: int
    """Its first token, of the whole text."""


class TokenPieces:
    """The tokens of passages that are joined.

    Parameters
    ----------
    passages : at least one; they are read again for every piece
    encode : tokenizer; what it adds before and behind a text stands before and behind the whole
    between : what stands between two passages: a blank line, or nothing where they are stretches of a text
    """

    def __init__(self, passages: Sequence[str], encode: Encode, between: str = BETWEEN) -> None:
        self.passages = passages
        self.encode = encode
        self.between = between
        self._last: tuple[int, Tokens] = (-1, np.empty(0, np.int64))
        name = f"pieces-{of_encoder}" if (of_encoder := identity_of(encode)) else ""
        known = passages.load(name) if name and isinstance(passages, Remembering) else None
        if known is None:
            known = self._counted()
            if name and isinstance(passages, Remembering):
                passages.keep(name, known)
        self._pieces = [Piece(*numbers) for numbers in known["pieces"]]
        self._num_tokens = int(known["tokens"])

    def __len__(self) -> int:
        return self._num_tokens

    def spans(self, starts: Sequence[int], length: int) -> Tensor:
        """Tokens from each of some places on: (places, length), int64."""
        found = torch.empty(len(starts), length, dtype=torch.int64)
        firsts = [piece.start for piece in self._pieces]
        for place in in_shares(
            sorted(range(len(starts)), key=lambda place: starts[place]), "encoding windows"
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
            found[place] = torch.from_numpy(np.concatenate(parts))
        return found

    def all(self, folder: Path | None = None) -> Tensor:
        """All tokens, int64; many are in a file without a name, which goes with the tensor, in ``folder``."""
        tokens: Tokens = (
            np.empty(len(self), np.int64) if len(self) < IN_MEMORY else _in_file(len(self), folder)
        )
        share = Share("encoding", len(self))
        for number, piece in enumerate(self._pieces):
            share(piece.start)
            part = self._tokens(number)
            tokens[piece.start : piece.start + len(part)] = part
        return torch.from_numpy(tokens)

    def _tokens(self, number: int) -> Tokens:
        """Of one piece."""
        if self._last[0] != number:
            piece = self._pieces[number]
            last = number + 1 == len(self._pieces)
            following = None if last else self._pieces[number + 1]
            passages = list(
                self.passages[piece.context : None if following is None else following.first]
            )
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
            wanted = (len(self) if following is None else following.start) - piece.start
            if len(self._last[1]) != wanted:
                raise RuntimeError(
                    f"piece {number} of a text has {len(self._last[1])} tokens, {wanted} were"
                    " counted"
                )
        return self._last[1]

    @cached_property
    def _ending(self) -> tuple[int, ...] | None:
        return special_ending(self.encode)

    def _counted(self) -> dict[str, Any]:
        """Cut the text and count its tokens."""
        open_piece = _Open("", [], "", Piece(0, 0, 0, 0))
        pieces = list[Piece]()
        body = list[str]()
        size = 0
        failures = 0
        share = Share("tokenising", len(self.passages))
        for number, passage in enumerate(self.passages):
            if size >= PIECE_CHARACTERS and failures < MOST_FAILURES:
                following = self._cut(open_piece, body, passage, number)
                failures = 0 if following else failures + 1
                share(number)
                if following:
                    pieces.append(open_piece.piece)
                    open_piece = following
                    body = []
                    size = 0
            body.append(passage)
            size += len(passage) + len(self.between)
        pieces.append(open_piece.piece)
        tokens = self._behind(open_piece, self._text(open_piece.moved, body, None), ())
        if tokens is None:  # encode the text whole
            beat("tokenising all of a text that cannot be cut")
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
        """End a piece behind ``body`` and begin one with ``passage``; None if the text cannot be cut there."""
        if (ending := self._ending) is None:
            return None
        context = _context_of(body)
        before = self._before(body[len(body) - context :])
        blanks = len(before) - len(before.rstrip())
        for moved in range(min(blanks, MOST_MOVED) + 1):
            stem = before[: len(before) - moved]
            rest = before[len(before) - moved :]
            alone = _encoded(self.encode, stem, ending)
            together = _encoded(self.encode, before + passage[:LONGEST_CONTEXT], ending)
            if not alone or together[: len(alone)] != alone:
                continue
            piece = Piece(number, number - context, moved, 0)
            tokens = self._behind(open_piece, self._text(open_piece.moved, body, piece), ending)
            end = alone[len(alone) // 2 :]
            if tokens is not None and tokens[-len(end) :] == end:
                return _Open(
                    stem, alone, rest, replace(piece, start=open_piece.piece.start + len(tokens))
                )
        return None

    def _before(self, passages: Sequence[str]) -> str:
        """The end of some passages and of what stands behind them; empty if there are none."""
        return (self.between.join(passages)[-LONGEST_CONTEXT:] + self.between) if passages else ""

    def _text(self, moved: str, passages: Sequence[str], following: Piece | None) -> str:
        """Passages of a piece, behind what it has of the characters before them, up to what the ``following`` one has."""
        if following is None:
            return moved + self.between.join(passages)
        text = moved + self.between.join(passages) + self.between
        return text[: len(text) - following.moved]

    def _behind(self, piece: "_Open", text: str, ending: tuple[int, ...]) -> list[int] | None:
        """The tokens of a piece without those of its context; None if the context has others before this text."""
        tokens = _encoded(self.encode, piece.context + text, ending)
        return tokens[len(piece.tokens) :] if tokens[: len(piece.tokens)] == piece.tokens else None


@dataclass(frozen=True)
class _Open:
    """A piece whose end is not known yet."""

    context: str
    tokens: list[int]
    """Of the context."""
    moved: str
    """What stands between the context and the piece's first passage."""
    piece: Piece


def special_ending(encode: Encode) -> tuple[int, ...] | None:
    """What a tokenizer adds behind every text; None if that cannot be told."""
    nothing = list(encode(""))
    something = list(encode("a"))
    ahead = next(
        (
            place
            for place, pair in enumerate(zip(nothing, something, strict=False))
            if pair[0] != pair[1]
        ),
        len(nothing),
    )
    ending = nothing[ahead:]
    return (
        tuple(ending)
        if len(something) > len(nothing) and something[len(something) - len(ending) :] == ending
        else None
    )


def identity_of(encode: Encode) -> str:
    """Names the tokenizer of a model by what it does, across processes; empty for other functions."""
    return str(getattr(getattr(encode, "__self__", None), "tokenizer_sha256", ""))


def _encoded(encode: Encode, text: str, ending: tuple[int, ...]) -> list[int]:
    """Tokens of a text, without those that a tokenizer adds behind it."""
    tokens = list(encode(text))
    return tokens[: len(tokens) - len(ending)]


def _context_of(passages: Sequence[str]) -> int:
    """How many of the last passages are a context."""
    size = 0
    for number, passage in enumerate(reversed(passages), start=1):
        size += len(passage)
        if size >= CONTEXT_CHARACTERS:
            return number
    return len(passages)


def _in_file(number: int, folder: Path | None) -> Tokens:
    """So many tokens in a file without a name, of this process alone, that is mapped into memory."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype=np.int64, mode="w+", shape=(number,))
