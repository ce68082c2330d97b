"""Settings of methods whose result is one model per client."""

from pydantic import Field

from espalier.settings.method import MethodSettings


class PersonalModelSettings(MethodSettings):
    """Settings that control whether each client's model is written."""

    keep_models: bool = Field(
        True,
        description=(
            "Each client writes its smaller model after the rounds: in a simulation to `clients/`"
            " in the run directory, at a real site to its `models-dir`, if its owner names one."
        ),
    )
