"""Members that a method may override: at most 15, and none derives from another method."""

from espalier.settings.registry import METHODS, part
from strategies.averaging.adapter_averager import Tuning
from strategies.base.method import Method
from strategies.masks import Masking


def test_a_method_may_override_at_most_15_members() -> None:
    assert len([name for name in vars(Method) if not name.startswith("_")]) <= 15


def test_no_method_derives_from_another_one() -> None:
    strategies = {part(entry.strategy) for entry in METHODS.values()}
    assert {base for one in strategies for base in one.__bases__} == {Method, Tuning, Masking}
