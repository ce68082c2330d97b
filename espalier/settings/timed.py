"""What methods say whose rounds a simulation can time by the clock of a fleet that it pretends to have."""

from pydantic import Field

from espalier.settings.method import MethodSettings

NONE = "none"


class TimedSettings(MethodSettings):
    """Which devices the run pretends to have."""

    fleet: str = Field(
        NONE,
        min_length=1,
        description=(
            "Devices that the run pretends to have, for `virtual_seconds` in summary and ledger:"
            " `full`, `low`, `medium` or `high` of `conf/devices`, or a file; `none`: nothing is"
            " told."
        ),
    )

    def fleet_name(self, *, simulation: bool) -> str:
        """The fleet of a run; empty where there is none."""
        return "" if self.fleet == NONE else self.fleet

    @property
    def fleet_is_named(self) -> bool:
        """Whether the fleet is one of the settings', in a simulation and in a deployment."""
        return self.fleet_name(simulation=False) != ""
