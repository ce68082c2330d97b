"""Token samples: random for calibration, consecutive for evaluation and training.

Windows do not overlap and have no padding. The text is tokenized in pieces (``token_pieces.py``),
so that memory stays bounded.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from espalier.amounts import count
from espalier.data.files.file_text import FileText
from espalier.data.token_pieces import Encode, TokenPieces
from espalier.errors import InputError

ONCE = "duplicate passages count once, and one passage in ten is held out"
"""Hint in errors about a client's text that is too short, because its file may be long."""


def calibration_samples(
    passages: Sequence[str], encode: Encode, num_samples: int, sequence_length: int, seed: int
) -> Tensor:
    """Draw calibration samples from a client's passages without replacement.

    The samples lie on a grid of ``sequence_length`` tokens with a random offset.

    Returns
    -------
    Tensor
        (num_samples, sequence_length), int64

    Raises
    ------
    InputError
        The text is too short. The error has the numbers but not the text.
    """
    tokens = TokenPieces(passages, encode) if passages else ()
    available = len(tokens) // sequence_length
    if not isinstance(tokens, TokenPieces) or available < num_samples:
        remedy = "give the client more text, or lower data.num-samples or data.sequence-length"
        raise InputError(
            f"data: the client's text gives {count(available, 'sample')} of {sequence_length}"
            f" tokens, but data.num-samples = {num_samples} are needed; {ONCE}; {remedy}",
            "data: the client's text gives too few samples of data.sequence-length ="
            f" {sequence_length} tokens; {ONCE}; {remedy}",
        )
    starts = calibration_starts(len(tokens), num_samples, sequence_length, seed)
    return tokens.spans(starts, sequence_length)


def calibration_starts(
    num_tokens: int, num_samples: int, sequence_length: int, seed: int
) -> list[int]:
    """Draw the index of the first token of each calibration sample."""
    available = num_tokens // sequence_length
    generator = torch.Generator().manual_seed(seed)
    # A random offset below one sample, so that different seeds can have different boundaries.
    offset = int(
        torch.randint(num_tokens - available * sequence_length + 1, (1,), generator=generator)
    )
    drawn = torch.randperm(available, generator=generator)[:num_samples].tolist()
    return [offset + number * sequence_length for number in drawn]


def evaluation_samples(
    text: str | Sequence[str], encode: Encode, sequence_length: int, max_samples: int, what: str
) -> Tensor:
    """Cut a text into consecutive samples and take up to ``max_samples`` evenly spaced ones.

    With ``max_samples = 0`` all samples are taken. Raises InputError if the text is shorter than
    one sample.

    Returns
    -------
    Tensor
        (samples, sequence_length), int64
    """
    tokens = _tokens(text, encode)
    available = _available(tokens, sequence_length, what, "evaluation.sequence-length")
    stride = available // max_samples if 0 < max_samples < available else 1
    places = range(0, available, stride)[: max_samples or None]
    return tokens.spans([place * sequence_length for place in places], sequence_length)


def all_samples(
    text: str | Sequence[str],
    encode: Encode,
    sequence_length: int,
    what: str,
    key: str,
    folder: Callable[[], Path] | None = None,
) -> Tensor:
    """Cut a text into consecutive samples and drop the tokens after the last whole sample.

    Raises InputError if the text is shorter than one sample.

    Parameters
    ----------
    what : description of the text, for errors
    key : setting to lower if the text is too short, for errors
    folder : function that makes the folder of the unnamed file that holds very many samples

    Returns
    -------
    Tensor
        (samples, sequence_length), int64
    """
    tokens = _tokens(text, encode)
    available = _available(tokens, sequence_length, what, key)
    return tokens.all(folder)[: available * sequence_length].view(available, sequence_length)


def _tokens(text: str | Sequence[str], encode: Encode) -> TokenPieces:
    if isinstance(text, FileText):
        return TokenPieces(text, encode, between="")
    return TokenPieces([text] if isinstance(text, str) else text or [""], encode)


def _available(tokens: TokenPieces, sequence_length: int, what: str, key: str) -> int:
    if (available := len(tokens) // sequence_length) == 0:
        text = (
            f"{what} has fewer than {key} = {sequence_length} tokens; give a longer text or lower"
            f" {key}"
        )
        raise InputError(text, text)
    return available


def samples_sha256(samples: Tensor) -> str:
    """Return the SHA-256 of the token ids as int64, little-endian, row-major."""
    return hashlib.sha256(samples.contiguous().numpy().astype("<i8").tobytes()).hexdigest()
