"""The tokens of passages joined by blank lines, of which a piece is in memory at a time.

The pieces must have the tokens of the whole text. It is cut between two passages, where encoding the end of what stands before
the cut gives the first tokens of encoding that end together with what follows; each piece is then encoded behind such an end,
whose tokens are left out. So a token that would reach over the cut is noticed, and one that a tokenizer sets before every text
does no harm. A place that fails is passed over; a text that cannot be cut is encoded whole.

This rests on tokenizers that look no further than a few words, as those do which split a text into words first, and those
whose tokens do not join words across lines.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    cut: int
    """How many newlines before its first passage belong to the piece before."""
    start: int
    """Its first token, of the whole text."""


class TokenPieces:
    """The tokens of passages that are joined by blank lines.

    Parameters
    ----------
    passages : at least one; they are read again for every piece
    encode : tokenizer; what it adds before and behind a text stands before and behind the whole
    """

    def __init__(self, passages: Sequence[str], encode: Encode) -> None:
        self.passages = passages
        self.encode = encode
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
        for place in sorted(range(len(starts)), key=lambda place: starts[place]):
            begin, end = starts[place], starts[place] + length
            number, parts = int(np.searchsorted(firsts, begin, side="right")) - 1, []
            while begin < end:
                tokens = self._tokens(number)
                part = tokens[begin - firsts[number] : end - firsts[number]]
                parts.append(part)
                begin, number = begin + len(part), number + 1
            found[place] = torch.from_numpy(np.concatenate(parts))
        return found

    def all(self, folder: Path | None = None) -> Tensor:
        """All tokens, int64; many are in a file without a name, which goes with the tensor, in ``folder``."""
        tokens: Tokens = np.empty(len(self), np.int64) if len(self) < IN_MEMORY else _in_file(len(self), folder)
        for number, piece in enumerate(self._pieces):
            part = self._tokens(number)
            tokens[piece.start : piece.start + len(part)] = part
        return torch.from_numpy(tokens)

    def _tokens(self, number: int) -> Tokens:
        """Of one piece."""
        if self._last[0] != number:
            piece, last = self._pieces[number], number + 1 == len(self._pieces)
            following = None if last else self._pieces[number + 1]
            passages = list(self.passages[piece.context : None if following is None else following.first])
            split = piece.first - piece.context
            context = BETWEEN.join(passages[:split])[-LONGEST_CONTEXT:] + BETWEEN[: piece.cut] if split else ""
            text = _text(passages[split:], piece.cut if split else len(BETWEEN), following.cut if following else 0)
            opened = _Open(context, _encoded(self.encode, context, self._ending or ()) if context else [], piece)
            tokens = self._behind(opened, text, () if last else self._ending or ()) or []
            self._last = number, np.array(tokens, dtype=np.int64)
            wanted = (len(self) if following is None else following.start) - piece.start
            if len(self._last[1]) != wanted:
                raise RuntimeError(f"piece {number} of a text has {len(self._last[1])} tokens, {wanted} were counted")
        return self._last[1]

    @cached_property
    def _ending(self) -> tuple[int, ...] | None:
        return special_ending(self.encode)

    def _counted(self) -> dict[str, Any]:
        """Cut the text and count its tokens."""
        open_piece, pieces = _Open("", [], Piece(0, 0, len(BETWEEN), 0)), list[Piece]()
        body, size, failures = list[str](), 0, 0
        for number, passage in enumerate(self.passages):
            if size >= PIECE_CHARACTERS and failures < MOST_FAILURES:
                following = self._cut(open_piece, body, passage, number)
                failures = 0 if following else failures + 1
                if following:
                    pieces.append(open_piece.piece)
                    open_piece, body, size = following, [], 0
            body.append(passage)
            size += len(passage) + len(BETWEEN)
        pieces.append(open_piece.piece)
        tokens = self._behind(open_piece, _text(body, open_piece.piece.cut, 0), ())
        if tokens is None:  # encode the text whole
            pieces = [Piece(0, 0, len(BETWEEN), 0)]
            tokens = list(self.encode(BETWEEN.join(self.passages)))
        self._last = len(pieces) - 1, np.array(tokens, dtype=np.int64)
        return {"tokens": pieces[-1].start + len(tokens), "pieces": [astuple(piece) for piece in pieces]}

    def _cut(self, before: "_Open", body: list[str], passage: str, number: int) -> "_Open | None":
        """End a piece behind ``body`` and begin one with ``passage``; None if the text cannot be cut there."""
        if (ending := self._ending) is None:
            return None
        context = _context_of(body)
        text = BETWEEN.join(body[len(body) - context :])[-LONGEST_CONTEXT:]
        for newlines in range(len(BETWEEN), -1, -1):
            stem = text + BETWEEN[:newlines]
            alone = _encoded(self.encode, stem, ending)
            together = _encoded(self.encode, stem + BETWEEN[newlines:] + passage[:LONGEST_CONTEXT], ending)
            if not alone or together[: len(alone)] != alone:
                continue
            tokens = self._behind(before, _text(body, before.piece.cut, newlines), ending)
            end = alone[len(alone) // 2 :]
            if tokens is not None and tokens[-len(end) :] == end:
                piece = Piece(number, number - context, newlines, before.piece.start + len(tokens))
                return _Open(stem, alone, piece)
        return None

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
    piece: Piece


def special_ending(encode: Encode) -> tuple[int, ...] | None:
    """What a tokenizer adds behind every text; None if that cannot be told."""
    nothing, something = list(encode("")), list(encode("a"))
    ahead = next(
        (place for place, pair in enumerate(zip(nothing, something, strict=False)) if pair[0] != pair[1]), len(nothing)
    )
    ending = nothing[ahead:]
    return tuple(ending) if len(something) > len(nothing) and something[len(something) - len(ending) :] == ending else None


def identity_of(encode: Encode) -> str:
    """Names the tokenizer of a model by what it does, across processes; empty for other functions."""
    return str(getattr(getattr(encode, "__self__", None), "tokenizer_sha256", ""))


def _encoded(encode: Encode, text: str, ending: tuple[int, ...]) -> list[int]:
    """Tokens of a text, without those that a tokenizer adds behind it."""
    tokens = list(encode(text))
    return tokens[: len(tokens) - len(ending)]


def _text(passages: Sequence[str], before: int, behind: int) -> str:
    """Passages with blank lines between them, and what belongs to them of the newlines on both sides."""
    return BETWEEN[before:] + BETWEEN.join(passages) + BETWEEN[:behind]


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
