"""Token windows: drawn at random for calibration, in order for evaluation; never overlapping, never padded."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.settings.mistakes import Mistake

Encode = Callable[[str], Sequence[int]]
"""A tokenizer: text to token ids."""


def calibration_windows(passages: Sequence[str], encode: Encode, num_windows: int, window_tokens: int, seed: int) -> Tensor:
    """Draw windows from a client's passages without replacement.

    Returns
    -------
    Tensor
        (num_windows, window_tokens), int64

    Raises
    ------
    Mistake
        There is too little text; the numbers are named, the text is not.
    """
    tokens = torch.tensor(encode("\n\n".join(passages)) if passages else [], dtype=torch.int64)
    available = len(tokens) // window_tokens
    if available < num_windows:
        raise Mistake(
            f"data: the client's text gives {available} windows of {window_tokens} tokens, "
            f"data.windows = {num_windows} are needed; "
            "give the client more text, or lower data.windows or data.window-tokens"
        )
    generator = torch.Generator().manual_seed(seed)
    offset = int(torch.randint(len(tokens) - available * window_tokens + 1, (1,), generator=generator))
    windows = tokens[offset : offset + available * window_tokens].view(available, window_tokens)
    return windows[torch.randperm(available, generator=generator)[:num_windows]]


def evaluation_windows(text: str, encode: Encode, window_tokens: int, max_windows: int, what: str) -> Tensor:
    """Cut a text into consecutive windows and take at most ``max_windows`` of them at even distances (0: all).

    Returns
    -------
    Tensor
        (windows, window_tokens), int64

    Raises
    ------
    Mistake
        The text has not even one window.
    """
    windows = all_windows(text, encode, window_tokens, what, "evaluation.window-tokens")
    stride = len(windows) // max_windows if 0 < max_windows < len(windows) else 1
    return windows[::stride][: max_windows or None]


def all_windows(text: str, encode: Encode, window_tokens: int, what: str, key: str) -> Tensor:
    """Cut a text into consecutive windows; tokens beyond the last whole one are left out: (windows, tokens), int64.

    Raises
    ------
    Mistake
        The text has not even one window; ``what`` it is and the ``key`` to lower are named.
    """
    tokens = torch.tensor(encode(text), dtype=torch.int64)
    available = len(tokens) // window_tokens
    if available == 0:
        raise Mistake(f"{what} has fewer than {key} = {window_tokens} tokens; give a longer text or lower {key}")
    return tokens[: available * window_tokens].view(available, window_tokens)


def windows_sha256(windows: Tensor) -> str:
    """SHA-256 of the token ids, as int64, little-endian, row-major."""
    return hashlib.sha256(windows.contiguous().numpy().astype("<i8").tobytes()).hexdigest()
