"""Device, dtype and threads of the computation."""

import ctypes
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from espalier.errors import InputError
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 4 << 20
"""Size from which a tensor is returned to the system when it is freed."""
KEPT_BYTES = 32 << 20
"""Maximum free memory at the end of the heap; more is returned to the system."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Computing:
    """Device, dtype of the forward pass, number of CPU threads, and storage of hidden states."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    activations_folder: Path | None = None
    """Folder on whose disk hidden states between blocks are stored; None keeps them in memory."""
    attention: str = "sdpa"
    """Implementation of attention in transformers."""
    spread: tuple[torch.device, ...] = ()
    """Devices over which a model for tuning is spread; empty: ``device`` holds it."""

    def choose_attention(self, model: Any) -> None:
        """Let a model of Hugging Face use the implementation; ``sdpa`` is transformers' default."""
        if self.attention != "sdpa":
            model.set_attn_implementation(self.attention)


def return_large_blocks() -> None:
    """Make the C library return large freed tensors to the system, and keep small ones.

    By default glibc raises its threshold for this with each large tensor that is freed, up to 32
    MB, and then keeps holes in its heap. When the blocks of a model with 1.1 billion parameters
    were streamed, the holes took half a gigabyte. Returning everything is slow: with a threshold of
    1 MB, clearing new pages took a third of the time of the demo. Other C libraries do not have
    these settings and are not changed.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def set_up(settings: RunSettings, folder: Path, node: NodeSettings | None = None) -> Computing:
    """Choose device, dtype and threads, and set the number of threads of this process.

    The settings of a node take precedence over those of the run.

    Parameters
    ----------
    settings : settings of the run
    folder : folder for hidden states on disk
    node : settings of the node, if any

    Raises
    ------
    InputError
        The device is ``cuda``, but there is no CUDA device; or attention cannot be computed as
        wanted.
    """
    device = (node.device if node else "") or settings.device
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device = 'cuda': this machine has no CUDA device that torch can use; set device to"
            " 'auto' or 'cpu'"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = (node.attention if node else "") or settings.attention
    if attention == "flash_attention_2":
        _require_flash_attention(device, settings)
    threads = (node.threads if node else 0) or settings.threads
    torch.set_num_threads(threads)
    return_large_blocks()
    on_disk = ((node.activations if node else "") or settings.activations) == "disk"
    return Computing(
        torch.device(device),
        DTYPES[settings.dtype],
        threads,
        folder if on_disk else None,
        attention,
        _devices(node) if device == "cuda" else (),
    )


def _devices(node: NodeSettings | None) -> tuple[torch.device, ...]:
    """Return the CUDA devices over which a node spreads a model; empty if it has or wants one."""
    if node is None or node.device_map != "auto":
        return ()
    devices = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return devices if len(devices) > 1 else ()


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device in bytes."""
    return torch.cuda.mem_get_info(device)[0]


def _require_flash_attention(device: str, settings: RunSettings) -> None:
    """Refuse FlashAttention where it cannot run."""
    problem = ""
    base = settings.training.base if settings.tunes else settings.dtype
    dtype = settings.dtype if base == "nf4" else base
    if device != "cuda":
        problem = "it needs a CUDA device"
    elif settings.tunes and settings.task.packing:
        problem = "it does not separate packed records (task.packing); set that to false"
    elif find_spec("flash_attn") is None:
        problem = "the package flash-attn is not installed on this machine"
    elif dtype == "float32":
        key = "training.base" if settings.tunes and base != "nf4" else "dtype"
        problem = f"it does not compute in {key} = 'float32'; set {key} to 'bfloat16'"
    if problem:
        raise InputError(f"attention = 'flash_attention_2': {problem}, or set attention to 'sdpa'")


SIZE = 1024
REPEATS = 5
GIGA = 1e9


@cache
def measured_capability(computing: Computing) -> float:
    """Return the speed in billions of multiplications and additions per second.

    The result is the best of five measurements, rounded to two significant digits, and is measured
    once per process. Measurements differ from time to time, and so do layer samples that depend on
    them. A run that must be reproducible states its capabilities in the settings.
    """
    matrix = torch.ones(SIZE, SIZE, device=computing.device, dtype=computing.dtype)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        # item() waits for the result, because a CUDA device computes asynchronously.
        (matrix @ matrix).sum().item()
        seconds.append(time.perf_counter() - started)
    # The shortest time is least disturbed by other processes.
    return float(f"{2 * SIZE**3 / min(seconds) / GIGA:.1e}")
