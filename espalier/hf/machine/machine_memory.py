"""How much memory this machine has, how much of it is free, and how much this process holds.

Where a container or a service has less than the machine (Linux' control groups, version 1 or 2), that counts.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
LARGEST = 1 << 60
"""Version 1 writes a number above it where there is no limit."""


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that this process may have, all processes of its control groups together, and how many are free."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    for line in (
        Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ()
    ):
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    for most, used in limits(Path("/proc/self/cgroup"), GROUPS):
        total = min(total, most)
        free = min(free, max(0, most - used))
    return total, free


def limits(own: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Of each control group that has one its limit and what it uses, in bytes, files that it could let go of aside.

    Parameters
    ----------
    own : the file that names this process's groups
    groups : where they are mounted; in a container its own group is the root
    """
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = groups
            most = "memory.max"
            used = "memory.current"
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            most = "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for place in [group, *(parent for parent in group.parents if parent.is_relative_to(root))]:
            limit = _number(place / most)
            now = _number(place / used)
            if limit is not None and limit < LARGEST and now is not None:
                yield limit, max(0, now - _reclaimable(place / "memory.stat"))


def memory_kills(own: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> int | None:
    """Return how many processes of this control group the system has killed because memory was short.

    Parameters
    ----------
    own, groups : as for ``limits``

    Returns
    -------
    A count since the group was made; None if the system does not tell (Linux 4.13 and later do).
    """
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = groups
            events = "memory.events"
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            events = "memory.oom_control"
        else:
            continue
        group = root / path.lstrip("/")
        for place in [group, *(parent for parent in group.parents if parent.is_relative_to(root))]:
            if (kills := _count(place / events, "oom_kill")) is not None:
                return kills
    return None


def _count(path: Path, name: str) -> int | None:
    """Return a count of a file with a name and a number on each line."""
    try:
        return int(dict(line.split(maxsplit=1) for line in path.read_text().splitlines())[name])
    except (OSError, ValueError, KeyError):
        return None


def _number(path: Path) -> int | None:
    """A file's number; None where there is none, as ``max`` is."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path) -> int:
    """Bytes of files that were read and nobody has used for long."""
    try:
        stat = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not tell (Linux does)."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if told.exists() else 0
