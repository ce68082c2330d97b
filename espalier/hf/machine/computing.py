"""Where and how precisely tensors are computed."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from espalier.errors import Mistake
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Computing:
    """Device, dtype of the forward pass, CPU threads of this process, and where hidden states are kept."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    activations_folder: Path | None = None
    """Hidden states between blocks spill to this folder's disk; None: they stay in memory."""


def return_large_blocks() -> None:
    """Let the C library return freed tensors to the system at once.

    glibc raises its threshold for doing so with every large tensor that is freed, up to 32 MB, and then keeps holes among
    what is in use: streaming the blocks of a 1.1 billion parameter model left half a gigabyte of them. Other C libraries
    have no such setting and are left alone.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def set_up(settings: RunSettings, folder: Path, node: NodeSettings | None = None) -> Computing:
    """Choose device, dtype and threads, and apply the threads to this process; a node's own choice comes first.

    ``folder`` is where hidden states spill to, if they shall.

    Raises
    ------
    Mistake
        ``cuda`` is asked for and there is none.
    """
    device = (node.device if node else "") or settings.device
    if device == "cuda" and not torch.cuda.is_available():
        raise Mistake(
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
