"""A hash of the program that a node runs, so that a server notices a node with another version of it."""

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

PACKAGES = ("client_app", "espalier", "pruning_kernels")
"""What runs on a node."""


@cache
def code_sha256() -> str:
    """SHA-256 over names and bytes of all Python files of the packages that run on a node."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"package {package} is not installed")
        root = Path(next(iter(spec.submodule_search_locations)))
        for file in sorted(root.rglob("*.py")):
            name = f"{package}/{file.relative_to(root).as_posix()}".encode()
            digest.update(len(name).to_bytes(8, "big") + name + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
