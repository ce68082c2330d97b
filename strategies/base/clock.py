"""Clock of a strategy; tests replace it with one that they move by hand."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Source of monotonic time, in seconds, and a function that waits."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
