"""Device, dtype and threads of the computation."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from espalier.errors import InputError
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Computing:
    """Device, dtype of the forward pass, number of CPU threads, and storage of hidden states."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    activations_folder: Path | None = None
    """Folder on whose disk hidden states between blocks are stored; None keeps them in memory."""


def return_large_blocks() -> None:
    """Make the C library return freed tensors to the system immediately.

    glibc raises its threshold for this with each large tensor that is freed, up to 32 MB, and then
    keeps holes in its heap. When the blocks of a model with 1.1 billion parameters were streamed,
    the holes took half a gigabyte. Other C libraries do not have this setting and are not changed.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


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
        The device is ``cuda``, but there is no CUDA device.
    """
    device = (node.device if node else "") or settings.device
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device = 'cuda': this machine has no CUDA device that torch can use; set device to"
            " 'auto' or 'cpu'"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = (node.threads if node else 0) or settings.threads
    torch.set_num_threads(threads)
    return_large_blocks()
    on_disk = ((node.activations if node else "") or settings.activations) == "disk"
    return Computing(
        torch.device(device), DTYPES[settings.dtype], threads, folder if on_disk else None
    )
