"""Token windows: random for calibration, consecutive for evaluation and training.

Windows do not overlap and have no padding. The text is tokenized in pieces (``token_pieces.py``),
so that memory stays bounded.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from espalier.amounts import count
from espalier.data.files.file_text import FileText
from espalier.data.token_pieces import Encode, TokenPieces
from espalier.errors import InputError

ONCE = "duplicate passages count once"
"""Hint in errors about a client's text that is too short, because its file may be long."""


def calibration_windows(
    passages: Sequence[str], encode: Encode, num_windows: int, window_tokens: int, seed: int
) -> Tensor:
    """Draw calibration samples from a client's passages without replacement.

    The samples lie on a grid of ``window_tokens`` tokens with a random offset.

    Returns
    -------
    Tensor
        (num_windows, window_tokens), int64

    Raises
    ------
    InputError
        The text is too short. The error has the numbers but not the text.
    """
    tokens = TokenPieces(passages, encode) if passages else ()
    available = len(tokens) // window_tokens
    if not isinstance(tokens, TokenPieces) or available < num_windows:
        remedy = "give the client more text, or lower data.windows or data.window-tokens"
        raise InputError(
            f"data: the client's text gives {count(available, 'window')} of {window_tokens}"
            f" tokens, but data.windows = {num_windows} are needed; {ONCE}; {remedy}",
            f"data: the client's text gives too few windows of data.window-tokens = {window_tokens}"
            f" tokens; {ONCE}; {remedy}",
        )
    generator = torch.Generator().manual_seed(seed)
    # A random offset below one window, so that different seeds can have different boundaries.
    offset = int(
        torch.randint(len(tokens) - available * window_tokens + 1, (1,), generator=generator)
    )
    drawn = torch.randperm(available, generator=generator)[:num_windows].tolist()
    return tokens.spans([offset + number * window_tokens for number in drawn], window_tokens)


def evaluation_windows(
    text: str | Sequence[str], encode: Encode, window_tokens: int, max_windows: int, what: str
) -> Tensor:
    """Cut a text into consecutive windows and take up to ``max_windows`` evenly spaced ones.

    With ``max_windows = 0`` all windows are taken.

    Returns
    -------
    Tensor
        (windows, window_tokens), int64

    Raises
    ------
    InputError
        The text is shorter than one window.
    """
    tokens = _tokens(text, encode)
    available = _available(tokens, window_tokens, what, "evaluation.window-tokens")
    stride = available // max_windows if 0 < max_windows < available else 1
    places = range(0, available, stride)[: max_windows or None]
    return tokens.spans([place * window_tokens for place in places], window_tokens)


def all_windows(
    text: str | Sequence[str],
    encode: Encode,
    window_tokens: int,
    what: str,
    key: str,
    folder: Path | None = None,
) -> Tensor:
    """Cut a text into consecutive windows and drop the tokens after the last whole window.

    Parameters
    ----------
    what : description of the text, for errors
    key : setting to lower if the text is too short, for errors
    folder : folder of the unnamed file that holds very many windows

    Returns
    -------
    Tensor
        (windows, window_tokens), int64

    Raises
    ------
    InputError
        The text is shorter than one window.
    """
    tokens = _tokens(text, encode)
    available = _available(tokens, window_tokens, what, key)
    return tokens.all(folder)[: available * window_tokens].view(available, window_tokens)


def _tokens(text: str | Sequence[str], encode: Encode) -> TokenPieces:
    if isinstance(text, FileText):
        return TokenPieces(text, encode, between="")
    return TokenPieces([text] if isinstance(text, str) else text or [""], encode)


def _available(tokens: TokenPieces, window_tokens: int, what: str, key: str) -> int:
    if (available := len(tokens) // window_tokens) == 0:
        text = (
            f"{what} has fewer than {key} = {window_tokens} tokens; give a longer text or lower"
            f" {key}"
        )
        raise InputError(text, text)
    return available


def windows_sha256(windows: Tensor) -> str:
    """Return the SHA-256 of the token ids as int64, little-endian, row-major."""
    return hashlib.sha256(windows.contiguous().numpy().astype("<i8").tobytes()).hexdigest()
