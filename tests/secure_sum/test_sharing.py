"""Shares of secrets: any threshold of them suffices, fewer do not."""

from itertools import combinations

import pytest

from espalier.secure_sum.sharing import fingerprint, rebuilt, shared

HOLDERS = [0, 3, 4, 9, 12]
SECRET = bytes(range(16))


def test_any_three_of_five_suffice() -> None:
    shares = shared(SECRET, 3, HOLDERS)
    assert list(shares) == HOLDERS
    for number in (3, 4, 5):
        for some in combinations(HOLDERS, number):
            assert rebuilt({one: shares[one] for one in some}, 3, HOLDERS) == SECRET
    with pytest.raises(ValueError, match="2 shares, 3 are needed"):
        rebuilt({one: shares[one] for one in HOLDERS[:2]}, 3, HOLDERS)


def test_fewer_shares_give_another_secret() -> None:
    shares = shared(SECRET, 3, HOLDERS)
    assert rebuilt({one: shares[one] for one in HOLDERS[:2]}, 2, HOLDERS) != SECRET
    changed = shares | {0: bytes(16)}
    assert rebuilt(changed, 3, HOLDERS) != SECRET


def test_shares_are_random() -> None:
    first = shared(SECRET, 2, HOLDERS)
    second = shared(SECRET, 2, HOLDERS)
    assert len({*first.values(), *second.values()}) == 10
    assert len({fingerprint(share) for share in first.values()}) == 5
