"""Imports that take less time.

Flower starts a process for every message, and much of what it does is to import torch, transformers and peft: millions of
objects, all of which stay. Python's collector looks through them again and again, which takes a fifth of the time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """While libraries are imported, nothing is collected."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
