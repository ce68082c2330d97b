"""Masks: AES in counter mode by hand, and sums in which they vanish."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from espalier.messages.sums import masked_summands
from espalier.messages.sums.masked_summands import apply_mask, mask_summand, places_in_mask
from espalier.messages.sums.summands import SumSpec, add_to, clear_padding, pack, unpack
from espalier.secure_sum.masks import first_blocks, mask, num_blocks

KEY = bytes(range(32))


def test_words_are_encrypted_counters() -> None:
    cipher = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    blocks = b"".join(cipher.update(number.to_bytes(16, "big")) for number in range(5, 9))
    assert mask(KEY, 5, 8).tobytes() == blocks
    assert mask(KEY, 5, 3).tobytes() == blocks[:24]
    assert mask(KEY, 7, 4).tobytes() == blocks[32:]


def test_tensors_have_ranges_of_their_own() -> None:
    assert [num_blocks(words) for words in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert first_blocks([3, 1, 0, 4]) == [0, 2, 3, 3]
    specs = {"a": {"x": SumSpec(3, 64), "y": SumSpec(1, 4)}, "b": {"x": SumSpec(1, 128)}}
    assert places_in_mask(specs) == {("a", "x"): 0, ("a", "y"): 2, ("b", "x"): 3}


@pytest.mark.parametrize("bits", [1, 3, 4, 7, 32, 61, 64, 128])
def test_chunks_do_not_change_a_mask(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SumSpec(1000, bits)
    words = np.zeros(spec.num_words, np.uint64)
    apply_mask(words, spec, KEY, 3)
    whole = mask(KEY, 3, spec.num_words)
    clear_padding(whole, spec)
    assert words.tolist() == whole.tolist()
    monkeypatch.setattr(masked_summands, "CHUNK_WORDS", 1)
    apply_mask(words, spec, KEY, 3, subtracts=True)
    assert not words.any()


@pytest.mark.parametrize("bits", [2, 5, 64, 128])
def test_common_masks_vanish_in_the_sum(bits: int) -> None:
    spec = SumSpec(77, bits)
    generator = np.random.default_rng(bits)
    shape = (2, 77) if bits == 128 else (77,)
    clients = [1, 4, 6]
    numbers = {client: generator.integers(0, 1 << 64, shape, np.uint64) for client in clients}
    pairs = {(one, two): bytes([one, two] * 16) for one in clients for two in clients if one < two}
    total = np.zeros(spec.num_words, np.uint64)
    expected = total.copy()
    for client in clients:
        words = pack(numbers[client], spec)
        add_to(expected, words, spec)
        own = bytes([client] * 32)
        common = {
            other: pairs[min(client, other), max(client, other)]
            for other in clients
            if other != client
        }
        mask_summand(words, spec, 9, client, own, common)
        assert words.tolist() != pack(numbers[client], spec).tolist()
        add_to(total, words, spec)
    for client in clients:
        apply_mask(total, spec, bytes([client] * 32), 9, subtracts=True)
    assert unpack(total, spec).tolist() == unpack(expected, spec).tolist()
