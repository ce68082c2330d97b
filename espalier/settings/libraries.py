"""Check for optional libraries that only some settings need.

They are extras of the installation. The check runs before anything is computed.
"""

from importlib.util import find_spec

from espalier.errors import InputError
from espalier.settings.run import RunSettings

INSTALL = "install Espalier with its extra nf4 (pip install -e '.[nf4]') or bitsandbytes itself"
WITHOUT_BITSANDBYTES = (
    f"training.base = 'nf4': bitsandbytes is not installed on this machine; {INSTALL}, or set"
    " training.base to 'bfloat16'"
)


def require_libraries(settings: RunSettings) -> None:
    """Refuse a run whose settings need a library that this machine lacks.

    The library is searched for and not imported.

    Raises
    ------
    InputError
        The message names the setting and what to install.
    """
    if find_spec("bitsandbytes") is not None:
        return
    if settings.tunes and settings.training.base == "nf4":
        raise InputError(WITHOUT_BITSANDBYTES)
    if key := settings.job.brings_nf4:
        raise InputError(
            f"{settings.method}.{key}: bitsandbytes is not installed on this machine; {INSTALL}"
        )
