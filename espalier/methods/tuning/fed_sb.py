"""Fed-SB: settings.

A and B are frozen, and every party computes them. Only the matrix between them is trained and sent.
"""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.methods.tuning.adapters.row import averaging_row
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.summands import summands
from espalier.models.adapters import Bases
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings


class FedSbSettings(AdapterAveraging):
    """Table ``[fed-sb]``.

    Source: Singhal et al. 2025, "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and
    Performance in (Private) Federated LoRA Fine-Tuning".
    """

    FEDERATION: ClassVar[tuple[str, ...]] = (*AdapterAveraging.FEDERATION, "fleet", "secure-sum")
    PRUNES = False

    frozen_bases: Literal["weights", "seed"] = Field(
        "weights",
        description=(
            "Frozen factors A and B. `weights`: the first singular vectors of each matrix of the"
            " base model; `seed`: random orthonormal vectors. A node computes them once, and keeps"
            " them in `<state-dir>/frozen-factors`."
        ),
    )

    @property
    def averaged(self) -> str:
        """Word for what is averaged, for a run's description."""
        return "matrices between frozen factors"

    @property
    def bases(self) -> Bases:
        """Kind of the frozen factors."""
        return self.frozen_bases

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        if lora.keep_zeros:
            lines.append(
                "lora.keep-zeros = true: fed-sb cannot mask the update of a pruned base; set it to"
                " false, or method to 'fedpetuning'"
            )
        return lines


METHOD = averaging_row(
    title="Fed-SB (only a small square matrix between the frozen factors of LoRA is trained)",
    settings=FedSbSettings,
    strategy="strategies.tuning.fed_sb:FedSb",
    summands=summands,
    to_summands="client_app.summands.adapters:of_adapters",
)
