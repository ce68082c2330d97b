"""Numba's compiler, with machine code kept on disk where a directory for it can be written.

Numba itself is imported when the first kernel is: small models do without it, and start sooner.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

WORTH_COMPILING = 1 << 20
"""Weights of a matrix from which on compiling a kernel takes less time than it saves."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel at its first call; a later process finds it in the cache, unless there is no place for one."""
    import numba

    _keep_code_of_these_sources()

    def decorate(kernel: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(kernel)
        except RuntimeError:
            # Neither beside the source nor in the user's cache directory can a file be written.
            return numba.njit(**options)(kernel)

    return decorate


@cache
def _keep_code_of_these_sources() -> None:
    """Keep machine code in a directory named by a hash of all kernels' sources.

    Numba alone looks at the file of a kernel, not at those of the kernels that are compiled into it.
    """
    import numba

    here = Path(__file__).parent
    digest = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(here.glob("*.py")))
    ).hexdigest()
    root = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else here / "__pycache__"
    numba.config.CACHE_DIR = str(root / f"kernels-{digest[:16]}")


def instruction(rule: Callable[..., Any]) -> Any:
    """Make a function for kernels that is written as LLVM instructions."""
    from numba.extending import intrinsic

    return intrinsic(rule)


def use_threads_of_torch() -> int:
    """Let parallel kernels use as many threads as torch does, and return how many; results do not depend on it."""
    import numba

    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    return threads
