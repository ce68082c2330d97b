"""Numba's compiler, with a cache of machine code on disk if a directory for it is writable.

Numba is imported with the first kernel. Runs with small models do not need it and start faster.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

WORTH_COMPILING = 1 << 20
"""Number of weights of a matrix from which compilation of a kernel pays off."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel at its first call; later processes load it from the cache."""
    import numba

    _set_cache_folder()

    def decorate(kernel: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(kernel)
        except RuntimeError:
            # Neither the source's directory nor the user's cache directory is writable.
            return numba.njit(**options)(kernel)

    return decorate


@cache
def _set_cache_folder() -> None:
    """Set a cache directory that is named by a hash of all kernels' sources.

    Numba checks only the file of a kernel, and not the files of kernels that are inlined into it.
    """
    import numba

    here = Path(__file__).parent
    digest = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(here.rglob("*.py")))
    ).hexdigest()
    root = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else here / "__pycache__"
    numba.config.CACHE_DIR = str(root / f"kernels-{digest[:16]}")


def use_threads_of_torch() -> int:
    """Set numba's number of threads to torch's, and return it; results do not depend on it."""
    import numba

    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    return threads
