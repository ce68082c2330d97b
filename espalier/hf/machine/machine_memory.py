"""Memory of this machine and of this process, without torch, which a node that waits must not hold.

If a container or service may use less memory than the machine has (Linux control groups, version 1
or 2), the lower limit counts.
"""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

OWN = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
STATUS = Path("/proc/self/status")
LARGEST = 1 << 60
"""Limits from this value on mean "unlimited": version 1 has no other way to say so."""


def machine_memory() -> tuple[int, int]:
    """Return the memory that this process may use, and how much of it is free, in bytes.

    All processes of the same control groups share this memory.
    """
    memory = psutil.virtual_memory()
    total = memory.total
    free = memory.available
    for limit, used in limits(OWN, GROUPS):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return total, free


def limits(own: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage of each control group that has a limit, in bytes.

    File caches that the kernel can reclaim do not count as usage.

    Parameters
    ----------
    own : file that lists the control groups of this process
    groups : mount point of the control groups; inside a container, its own group is the root
    """
    for folder, version in _memory_groups(own, groups):
        # The limit of a parent group also applies to its children.
        limit = _number(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        used = _number(folder / ("memory.usage_in_bytes" if version == 1 else "memory.current"))
        if limit is not None and limit < LARGEST and used is not None:
            stat = _counts(folder / "memory.stat")
            reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            yield limit, max(0, used - reclaimable)


def memory_kills(own: Path = OWN, groups: Path = GROUPS) -> int | None:
    """Return how many processes of this control group were killed for lack of memory.

    The result is None if the kernel does not report it (Linux does from version 4.13 on).
    Parameters are those of ``limits``.
    """
    for folder, version in _memory_groups(own, groups):
        events = _counts(folder / ("memory.oom_control" if version == 1 else "memory.events"))
        if "oom_kill" in events:
            return events["oom_kill"]
    return None


def _memory_groups(membership_file: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """Yield this process's folder for memory, its parents, and the version of the hierarchy."""
    for line in membership_file.read_text().splitlines() if membership_file.exists() else ():
        _, controllers, path = line.split(":", 2)
        # Version 2 has a single hierarchy, whose entry names no controllers.
        version = 1 if controllers else 2
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        folder = root / path.lstrip("/")
        for ancestor in (folder, *folder.parents):
            if ancestor.is_relative_to(root):
                yield ancestor, version


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it holds no number, such as ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _counts(path: Path) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number on each line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    rss: int = psutil.Process().memory_info().rss
    return rss


def peak_resident() -> int:
    """Return the most bytes of memory that this process has held since it started."""
    if STATUS.exists():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    # Linux counts the parent of a new process here; other systems have only this number.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
