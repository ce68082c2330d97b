"""Libraries that only some settings need: they are extras of the installation, and asked for before anything is computed."""

from importlib.util import find_spec

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings

WITHOUT_BITSANDBYTES = (
    "training.base = 'nf4': bitsandbytes is not installed on this machine; install Espalier with its extra nf4 "
    "(pip install -e '.[nf4]') or bitsandbytes itself, or set training.base to 'bfloat16'"
)


def require_libraries(settings: RunSettings) -> None:
    """Refuse a run whose settings need a library that this machine lacks. No library is imported.

    Raises
    ------
    Mistake
        It names the setting and what to install.
    """
    if settings.tunes and settings.training.base == "nf4" and find_spec("bitsandbytes") is None:
        raise Mistake(WITHOUT_BITSANDBYTES)
