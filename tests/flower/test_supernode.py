"""Waiting times of this project's SuperNodes."""

import inspect
import time

from flwr.supernode import start_client_internal

from espalier.flower.supernode import ASK_SECONDS, BUSY_SECONDS, REPLY_SECONDS, Waits


def test_only_a_busy_node_asks_often() -> None:
    now = [0.0]
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    waits = Waits(lambda: now[0], sleep)
    waits.sleep(3)
    assert slept == [3]
    # Flower waits this long for a reply.
    waits.sleep(0.5)
    waits.sleep(0.01)
    waits.sleep(3)
    assert slept[1:] == [REPLY_SECONDS, 0.01, ASK_SECONDS]
    now[0] += BUSY_SECONDS
    waits.sleep(3)
    assert slept[4:] == [3]
    assert waits.monotonic is time.monotonic


def test_flower_s_loop_uses_replaced_sleep() -> None:
    assert start_client_internal.time is time
    source = inspect.getsource(start_client_internal)
    assert "time.sleep(3)" in source
    assert "time.sleep(0.5)" in source
    assert source.count("time.sleep(") == 3
