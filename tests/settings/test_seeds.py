"""Derived seeds against SHA-256 of the documented text."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.seeds import derive_seed


def test_is_the_upper_63_bits_of_the_hash() -> None:
    first = hashlib.sha256(b"7/calibration/3/2/11").hexdigest()[:16]
    assert derive_seed(7, "calibration", client=3, server_round=2, block=11) == int(first, 16) // 2


def test_unnamed_parts_are_zero() -> None:
    first = hashlib.sha256(b"0/ties/0/0/0").hexdigest()[:16]
    assert derive_seed(0, "ties") == int(first, 16) // 2


@pytest.mark.parametrize("change", [{"client": 1}, {"server_round": 1}, {"block": 1}])
def test_every_part_changes_the_seed(change: dict[str, int]) -> None:
    assert derive_seed(0, "a", **change) != derive_seed(0, "a")


def test_parts_are_not_interchangeable() -> None:
    seeds = {
        derive_seed(1, "a"),
        derive_seed(0, "a", client=1),
        derive_seed(0, "a", server_round=1),
        derive_seed(0, "a", block=1),
    }
    assert len(seeds) == 4
    assert derive_seed(0, "a") != derive_seed(0, "b")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**70), st.text(max_size=20), st.integers(0, 10**6))
def test_fits_a_signed_64_bit_integer(seed: int, purpose: str, client: int) -> None:
    assert 0 <= derive_seed(seed, purpose, client=client) < 2**63


def test_reads_no_global_generator() -> None:
    random.seed(1)
    first = derive_seed(5, "a")
    random.seed(2)
    assert derive_seed(5, "a") == first
