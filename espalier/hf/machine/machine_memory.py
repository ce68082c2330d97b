"""Memory of this machine and process, and peak memory of a computation on tensors without data.

If a container or service may use less memory than the machine has (Linux control groups, version 1
or 2), the lower limit counts.

The model's own code runs on torch's fake tensors. Each tensor is counted when it is created and
when it is freed. The result is the memory of a device that frees each tensor as soon as it is not
needed any more, as a CPU allocator does with large tensors (``computing.return_large_blocks``).

Does not cover: memory that a kernel uses while it runs, such as a packed copy of a matrix, and
tensors that existed before.
"""

import resource
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    for most, used in limits(OWN, GROUPS):
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


def _memory_groups(own: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """Yield this process's folder for memory, its parents, and the version of the hierarchy."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        # Version 2 has a single hierarchy, whose entry names no controllers.
        version = 1 if controllers else 2
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                yield place, version


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


def _first_expert(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Pass all tokens through the first expert, as often as experts are chosen for a token.

    Values, which fake tensors lack, would decide how many tokens each expert gets.
    """
    inputs = hidden.repeat_interleave(chosen.shape[-1], dim=0)
    gate, up = nn.functional.linear(inputs, experts.gate_up_proj[0]).chunk(2, dim=-1)
    outputs = nn.functional.linear(experts.act_fn(gate) * up, experts.down_proj[0])
    weighted = outputs * weights.reshape(-1, 1).to(outputs.dtype)
    return weighted.view(len(hidden), -1, hidden.shape[-1]).sum(dim=1)


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
    for part in module.modules():
        if isinstance(getattr(part, "gate_up_proj", None), nn.Parameter):
            part.forward = partial(_first_expert, part)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        with LiveBytes([*module.parameters(), *module.buffers()]) as live:
            yield live
