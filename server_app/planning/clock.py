"""Time of a run, from speeds that somebody states or that a short measurement on this machine gave: an estimate, no promise.

A client's seconds are its operations by its speed, and its bytes by its line; clients of a deployment work at the same time.
What the server computes, starts of processes, reading and tokenising are not in it.
"""

from dataclasses import dataclass

TERA = 1e12
MEGA = 1e6
STATED_TERAFLOPS = 0.05
STATED_MEGABITS = 100.0
"""Where nobody says anything: two cores of a laptop, a line of a household."""


@dataclass(frozen=True)
class Speeds:
    """What a client can do."""

    teraflops: float = STATED_TERAFLOPS
    """Additions and multiplications per second, in 10^12."""
    megabits: float = STATED_MEGABITS
    """Of its line in each direction, per second, in 10^6."""
    measured: bool = False
    """Whether ``teraflops`` were measured on this machine."""


def seconds(operations: float, num_bytes: int, speeds: Speeds) -> float:
    """Of so much work and traffic."""
    return operations / (speeds.teraflops * TERA) + 8 * num_bytes / (speeds.megabits * MEGA)
