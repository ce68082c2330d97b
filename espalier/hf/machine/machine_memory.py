"""Memory of this machine, and memory that this process uses.

If a container or service may use less memory than the machine has (Linux control groups, version 1
or 2), the lower limit counts.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
LARGEST = 1 << 60
"""Limits from this value on mean "unlimited": version 1 has no other way to say so."""


def machine_memory() -> tuple[int, int]:
    """Return the memory that this process may use, and how much of it is free, in bytes.

    All processes of the same control groups share this memory.
    """
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
    """Yield the limit and the usage of each control group that has a limit, in bytes.

    File caches that the kernel can reclaim do not count as usage.

    Parameters
    ----------
    own : file that lists the control groups of this process
    groups : mount point of the control groups; inside a container, its own group is the root
    """
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        # Version 2 has a single hierarchy, whose entry names no controllers.
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
            # The limit of a parent group also applies to its children.
            limit = _number(place / most)
            now = _number(place / used)
            if limit is not None and limit < LARGEST and now is not None:
                yield limit, max(0, now - _reclaimable(place / "memory.stat"))


def memory_kills(own: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> int | None:
    """Return how many processes of this control group were killed for lack of memory.

    Parameters
    ----------
    own, groups : see ``limits``

    Returns
    -------
    int or None
        Number of kills since the group was created; None if the kernel does not report it (Linux
        does from version 4.13 on)
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
    """Return a count from a file that has a name and a number on each line."""
    try:
        return int(dict(line.split(maxsplit=1) for line in path.read_text().splitlines())[name])
    except (OSError, ValueError, KeyError):
        return None


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it holds no number, such as ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path) -> int:
    """Return the bytes of cached files that have not been used for a long time."""
    try:
        stat = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 if the system does not report them."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0
