"""Estimated time of a run, from stated or measured speeds.

A client's time is its operations divided by its speed, plus its bytes divided by its bandwidth.
Clients of a deployment work at the same time. Work of the server, process starts, reading and
tokenization are not included.
"""

from dataclasses import dataclass

TERA = 1e12
MEGA = 1e6
STATED_TERAFLOPS = 0.05
STATED_MEGABITS = 100.0
"""Default speeds without other information: two cores of a laptop, and a home connection."""


@dataclass(frozen=True)
class Speeds:
    """Speed of a client."""

    teraflops: float = STATED_TERAFLOPS
    """Additions and multiplications per second, in 10^12."""
    megabits: float = STATED_MEGABITS
    """Bandwidth in each direction, in 10^6 bits per second."""
    measured: bool = False
    """True if ``teraflops`` were measured on this machine."""


def seconds(operations: float, num_bytes: int, speeds: Speeds) -> float:
    """Return the time for this amount of work and traffic, in seconds."""
    return operations / (speeds.teraflops * TERA) + 8 * num_bytes / (speeds.megabits * MEGA)
