"""Check for optional libraries that only some settings need.

They are extras of the installation. The check runs before anything is computed.
"""

from importlib.util import find_spec

from espalier.errors import InputError
from espalier.settings.run import RunSettings

EXTRA = "pip install -c constraints.txt -e '.[{}]'"
INSTALL = f"install Espalier with its extra nf4 ({EXTRA.format('nf4')}) or bitsandbytes itself"
WITHOUT_BITSANDBYTES = (
    f"training.base = 'nf4': bitsandbytes is not installed on this machine; {INSTALL}, or set"
    " training.base to 'bfloat16'"
)

PACKAGES = {"mlflow": "mlflow-skinny sqlalchemy alembic"}
"""Packages of a tracking tool, if they have other names than the tool."""


def require_libraries(settings: RunSettings) -> None:
    """Refuse a run whose settings need a library that this machine lacks.

    The library is searched for and not imported.

    Raises
    ------
    InputError
        The message names the setting and what to install.
    """
    require_tracking(settings)
    if (name := settings.data.partitioner) and find_spec("flwr_datasets") is None:
        raise InputError(
            f"data.partition = 'flwr:{name}': flwr-datasets is not installed on this machine;"
            f" install Espalier with its extra partitioners ({EXTRA.format('partitioners')}), or"
            " choose another partition"
        )
    if settings.privacy.on and find_spec("opacus") is None:
        raise InputError(
            f"privacy.epsilon = {settings.privacy.epsilon:g}: opacus is not installed on this"
            f" machine; install Espalier with its extra privacy ({EXTRA.format('privacy')}) or"
            " opacus itself, or set privacy.epsilon = 0"
        )
    if find_spec("bitsandbytes") is not None:
        return
    if settings.tunes and settings.training.base == "nf4":
        raise InputError(WITHOUT_BITSANDBYTES)
    if key := settings.job.brings_nf4:
        raise InputError(
            f"{settings.method}.{key}: bitsandbytes is not installed on this machine; {INSTALL}"
        )


def require_tracking(settings: RunSettings) -> None:
    """Refuse a run whose figures are for a tool that is not installed here; sites need none.

    Raises
    ------
    InputError
        The message has the command that installs the tool.
    """
    tool = settings.tracking
    if tool == "none" or find_spec(tool) is not None:
        return
    raise InputError(
        f"tracking = {tool!r}: the package {tool} is not installed on this machine; install"
        f" Espalier with its extra ({EXTRA.format(tool)}) or the package itself"
        f" (pip install {PACKAGES.get(tool, tool)}), or set tracking = 'none'"
    )
