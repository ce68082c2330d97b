"""Global adapters of clients with different ranks, and the energy of each rank over the rounds."""

from typing import Any

from espalier.models.plan import block_key
from pruning_kernels.lora.factors import Factors
from pruning_kernels.lora.rank_means import rank_energy
from strategies.averaging.adapters import AdapterResult


class RankedResult(AdapterResult):
    """Global adapters, and the energy of their ranks."""

    STATE = (*AdapterResult.STATE, "energy")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.energy: list[list[float]] = []
        """Fraction of the global update's energy in each rank, by round.

        Energy is the square of a singular value, summed over all matrices.
        """

    def note_energy(self, server_round: int) -> list[float]:
        """Record the energy of the global update after a round; return its share in each rank."""
        updates = []
        for index, adapter in self.adapters:
            tensors = self.tensors(block_key(index))
            updates.append(
                Factors(tensors[adapter.name_b], tensors[adapter.name_a], adapter.scaling)
            )
        energy = rank_energy(updates)
        total = energy.sum()
        # Before training all updates are zero.
        shares: list[float] = (energy / total if total > 0 else energy).tolist()
        # A repeated round replaces its entry.
        self.energy = [*self.energy[: server_round - 1], shares]
        return shares

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
        return super().report() | {"rank_energy": self.energy}
