"""Source files of the standard library's modules.

No module is imported, so none of their code runs.
"""

import importlib.util
from pathlib import Path

from espalier.errors import InputError


def module_files(names: tuple[str, ...], what: str) -> list[Path]:
    """Return the source files of modules, and of packages without their tests.

    Modules that this Python version lacks are skipped. Raises InputError if no module has a source
    file.

    Parameters
    ----------
    what : description of the text that needs the files, for errors
    """
    files = [file for name in names for file in _files_of(name)]
    if not files:
        raise InputError(
            f"{what}: this Python installation has no source files for {', '.join(names)}; "
            "install its full standard library, or give the node a data-path of its own"
        )
    return files


def _files_of(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        return [origin]
    tests = {"test", "tests"}
    return sorted(
        file
        for file in origin.parent.rglob("*.py")
        if not tests & set(file.relative_to(origin.parent).parts)
    )
