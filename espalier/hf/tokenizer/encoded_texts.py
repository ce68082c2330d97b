"""Cache of the token ids of texts, which every round of a run encodes again."""

import hashlib
from array import array
from collections.abc import Callable, Sequence

MAX_REMEMBERED = 1 << 23
"""Maximum number of token ids in a cache: 32 MiB, and some 200 bytes more for each text."""


class EncodedTexts:
    """Token ids of the last texts, at most ``MAX_REMEMBERED``.

    Parameters
    ----------
    encode : tokenizer, which is called for a text that is not in the cache
    """

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._known: dict[bytes, array[int]] = {}
        self._size = 0

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        # A hash as key takes less memory than the text.
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if (token_ids := self._known.get(key)) is None:
            token_ids = array("i", self._encode(text))
            self._size += len(token_ids)
            # Drop the oldest entries first.
            while self._known and self._size > MAX_REMEMBERED:
                self._size -= len(self._known.pop(next(iter(self._known))))
            self._known[key] = token_ids
        return token_ids.tolist()
