"""Waits for objects of a message that has not arrived completely."""

import pytest
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

from espalier.flower import pulls
from espalier.flower.pulls import ask_again_soon


def test_pulls_wait_longer_than_flower_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        function = getattr(inflatable_utils, name)
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    monkeypatch.setattr(pulls, "FIRST_SECONDS", 1e-4)
    monkeypatch.setattr(pulls, "LONGEST_SECONDS", 1e-4)
    ask_again_soon()
    attempts = iter(range(600))

    def pull(_: str) -> bytes:
        for _attempt in attempts:
            raise ObjectUnavailableError("one")
        return b"arrived"

    assert inflatable_utils.pull_objects(["one"], pull) == {"one": b"arrived"}
    assert inflatable_utils.pull_and_inflate_object_from_tree.__kwdefaults__[
        "initial_backoff"
    ] == pytest.approx(1e-4)
