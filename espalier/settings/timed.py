"""Settings of methods whose rounds a simulation can time with the clock of a virtual fleet."""

from pydantic import Field

from espalier.settings.method import MethodSettings

NONE = "none"


class TimedSettings(MethodSettings):
    """Settings that name the virtual devices of a run."""

    fleet: str = Field(
        NONE,
        min_length=1,
        description=(
            "Virtual devices that determine `virtual_seconds` in summary and ledger: `full`,"
            " `low`, `medium` or `high` of `conf/devices`, or a file. `none`: no virtual times."
        ),
    )

    def fleet_name(self, *, simulation: bool) -> str:
        """Return the name of the run's fleet; empty without a fleet."""
        return "" if self.fleet == NONE else self.fleet

    @property
    def fleet_is_named(self) -> bool:
        """True if the settings name a fleet that applies in a simulation and in a deployment."""
        return self.fleet_name(simulation=False) != ""
