"""How much memory this machine has, how much of it is free, and how much this process holds."""

import os
from pathlib import Path


def machine_memory() -> tuple[int, int]:
    """Bytes of memory of this machine, and how many of them are available to a new process."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    return total, free


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not tell (Linux does)."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if told.exists() else 0
