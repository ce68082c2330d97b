"""Masks: streams of AES-256 in counter mode, which are added to packed summands.

A key is used for one stream. Each tensor has its own range of counters, so a part of the tensors
can be masked without those before it.
"""

from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

BLOCK_BYTES = 16
"""Block size of AES in bytes."""
WORDS_PER_BLOCK = BLOCK_BYTES // 8


def num_blocks(num_words: int) -> int:
    """Return the number of blocks of a stream that ``num_words`` words take."""
    return -(-num_words // WORDS_PER_BLOCK)


def mask(key: bytes, first_block: int, num_words: int) -> NDArray[np.uint64]:
    """Return words of the stream of a key from a block on, (num_words,), uint64, writable."""
    # The counter starts at the tensor's own block, so ranges never overlap.
    counter = first_block.to_bytes(BLOCK_BYTES, "big")
    stream = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    data = bytearray(stream.update(bytes(num_blocks(num_words) * BLOCK_BYTES)))
    # The last block may be used in part.
    return np.frombuffer(data, "<u8")[:num_words].astype(np.uint64, copy=False)


def first_blocks(sizes: Iterable[int]) -> list[int]:
    """Return the block with which each tensor's mask begins, by the numbers of their words."""
    blocks = []
    block = 0
    for size in sizes:
        blocks.append(block)
        # Whole blocks, so that the next tensor begins with a fresh one.
        block += num_blocks(size)
    return blocks
