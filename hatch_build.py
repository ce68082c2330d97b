"""Build hook of the wheel: adds the whole Flower app in one folder (docs/how-to/packaging.md)."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

APP = "espalier_assets/app"
"""Folder of the app in the environment where the wheel is installed."""

PARTS = (
    "pyproject.toml",
    "conf",
    "server_app",
    "client_app",
    "strategies",
    "pruning_kernels",
    "espalier",
)
"""Parts of the app: the settings, the packages that ``fab-include`` names, and the presets."""


class AppInWheel(BuildHookInterface):
    """Build hook that adds the app to a wheel.

    An editable install (``pip install -e .``) does not need it, because its checkout is the app.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the parts of the app; hatchling calls this before it builds a wheel."""
        if version == "standard":
            build_data["force_include"].update({part: f"{APP}/{part}" for part in PARTS})
