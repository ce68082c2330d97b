"""Faster imports, without garbage collection.

Flower starts a process for every message. A large part of its time is the import of torch,
transformers and peft: millions of objects, all of which stay alive. Python's garbage collector
scans them repeatedly, which takes a fifth of the import time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while libraries are imported."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
