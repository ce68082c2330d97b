"""Package shared by the server and the clients of Espalier."""

import sys
from pathlib import Path

__version__ = "0.1.0"

_APP = Path(__file__).parent.parent / "espalier_assets" / "app"
if _APP.is_dir() and str(_APP) not in sys.path:
    # In a wheel, the app's other packages (``pruning_kernels``, ``strategies`` ...) are in this
    # folder; see docs/packaging.md.
    # It is appended, so that it hides no installed package of the same name.
    # A checkout and a Flower bundle have no such folder.
    sys.path.append(str(_APP))
