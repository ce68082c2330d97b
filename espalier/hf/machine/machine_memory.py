"""Memory of this machine and process, and peak memory of a computation on tensors without data.

If a container or service may use less memory than the machine has (Linux control groups, version 1
or 2), the lower limit counts.

The model's own code runs on torch's fake tensors. Each tensor is counted when it is created and
when it is freed. The result is the memory of a device that frees each tensor as soon as it is not
needed any more, as a CPU allocator does with large tensors (``computing.return_large_blocks``).

Does not cover: memory that a kernel uses while it runs, such as a packed copy of a matrix, and
tensors that existed before.
"""

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of all live tensors that operations created within the context.

    Parameters
    ----------
    held : tensors that existed before and are not counted
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in held
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the tensors that it returns."""
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self.note(one)
        return made

    def note(self, tensor: Tensor) -> None:
        """Count a tensor from now on until its storage is freed."""
        storage = tensor.untyped_storage()
        # Views share the storage of their base and take no memory of their own.
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._let_go, size)

    def _let_go(self, size: int) -> None:
        self.now -= size


@contextmanager
def traced(module: Any, dtype: torch.dtype) -> Iterator[LiveBytes]:
    """Run operations in this context on fake tensors, and count their memory.

    ``module``, which is on the meta device, stays a module of fake CPU tensors afterwards.

    Parameters
    ----------
    module : module to run
    dtype : dtype of its floating-point parameters that do not require a gradient
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        with LiveBytes([*module.parameters(), *module.buffers()]) as live:
            yield live
