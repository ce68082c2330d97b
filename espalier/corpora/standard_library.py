"""Where the source files of the standard library's modules lie; nothing is imported, and so nothing runs."""

import importlib.util
from pathlib import Path

from espalier.settings.mistakes import Mistake


def module_files(names: tuple[str, ...], what: str) -> list[Path]:
    """Source files of modules and of packages without their tests; a module that this Python lacks is passed over.

    Raises
    ------
    Mistake
        There is no file of any; ``what`` wants them is named.
    """
    files = [file for name in names for file in _files_of(name)]
    if not files:
        raise Mistake(
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
