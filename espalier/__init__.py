"""What server and clients of Espalier share."""

import sys
from pathlib import Path

__version__ = "0.1.0"

_APP = Path(__file__).parent.parent / "espalier_assets" / "app"
if _APP.is_dir() and str(_APP) not in sys.path:
    # Installed from a wheel, where pruning_kernels, strategies and the other rooms lie in the app's folder (docs/packaging.md).
    # Last, so that no package of somebody else's is hidden. In a checkout and in a Flower bundle there is no such folder.
    sys.path.append(str(_APP))
