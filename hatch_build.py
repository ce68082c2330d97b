"""What a wheel holds beside the packages: the Flower app as Flower wants it, complete in one folder (docs/packaging.md)."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

APP = "espalier_assets/app"
"""Where the app lies in the environment that a wheel is installed in."""

PARTS = (
    "pyproject.toml",
    "conf",
    "server_app",
    "client_app",
    "strategies",
    "pruning_kernels",
    "espalier",
)
"""What the app consists of: the settings and what fab-include names there, and the presets."""


class AppInWheel(BuildHookInterface):
    """Adds the app; ``pip install -e .`` goes without, for there the checkout is the app."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is put together."""
        if version == "standard":
            build_data["force_include"].update({part: f"{APP}/{part}" for part in PARTS})
