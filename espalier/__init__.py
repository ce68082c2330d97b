"""Federated pruning and tuning of language models; shared by the server and the clients.

``simulate`` and ``submit`` start runs, ``load_result`` opens the directory of an earlier one. They
are loaded when they are first used, because every process of a run imports this package.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espalier.api import load_result, simulate, submit
    from espalier.errors import InputError, RunError, RunInterrupted
    from espalier.results.result import Result

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "Result",
    "RunError",
    "RunInterrupted",
    "__version__",
    "load_result",
    "simulate",
    "submit",
]

_PLACES = {
    "InputError": "espalier.errors",
    "Result": "espalier.results.result",
    "RunError": "espalier.errors",
    "RunInterrupted": "espalier.errors",
    "load_result": "espalier.api",
    "simulate": "espalier.api",
    "submit": "espalier.api",
}
"""Module of each name of the Python interface."""

_APP = Path(__file__).parent.parent / "espalier_assets" / "app"
if _APP.is_dir() and str(_APP) not in sys.path:
    # In a wheel, the app's other packages (``pruning_kernels``, ``strategies`` ...) are in this
    # folder; see docs/how-to/packaging.md.
    # It is appended, so that it hides no installed package of the same name.
    # A checkout and a Flower bundle have no such folder.
    sys.path.append(str(_APP))


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
