"""Members that a method may override: at most 15, and methods share code as objects only."""

import pytest

from espalier.settings.methods import METHODS, part
from strategies.base.method import Method


def test_a_method_may_override_at_most_15_members() -> None:
    assert len([name for name in vars(Method) if not name.startswith("_")]) <= 15


@pytest.mark.parametrize("method", METHODS)
def test_no_method_derives_from_another_one(method: str) -> None:
    assert part(METHODS[method].strategy).__bases__ == (Method,)
