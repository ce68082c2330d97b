"""What FedSpine's rounds lead to: the global adapters, what each device has cut of its model, and what every round came to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from espalier.modeling.structured.trained_cut import cut_trained
from espalier.settings.run import RunSettings
from espalier.wire.adapter_payload import pack_adapters
from espalier.wire.adapters import AdapterPlan
from espalier.wire.cut_units import Cut, CutUnits
from espalier.wire.fedspine import trained
from espalier.wire.structure import Structure
from strategies.results.adapters import AdapterResult
from strategies.results.timed import DeviceTime, RoundTime


@dataclass(frozen=True)
class DeviceRound(DeviceTime):
    """What a round came to at one device."""

    pruned: float
    """Share of the parameters of groups and channels that is gone, as the bits have it."""
    rank: int
    importance: float
    """I(B_total), beside those of the round's other devices."""
    reward: float
    kept_its_cut: bool
    """It was asked to cut more, and cut nothing: it had measured nothing new, or nothing more can go."""


@dataclass(frozen=True)
class RoundNote(RoundTime):
    """What a round came to, in measured seconds where there is no fleet."""

    DEVICE: ClassVar[type[DeviceTime]] = DeviceRound


class RefinedResult(AdapterResult):
    """The global adapters, of the whole model, and a cut of the model for each device.

    Takes what ``AdapterResult`` does.
    """

    NOTE = RoundNote

    def __init__(self, settings: RunSettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self.units = CutUnits.of(self.model.plan)
        self.cuts: dict[int, str] = {}
        """Hash of the bits of what each device has cut; devices that have cut nothing are not among them."""
        self._plans: dict[tuple[str | None, int], AdapterPlan] = {}
        self._structures: dict[str | None, Structure] = {}
        self._cuts: dict[str | None, Cut] = {}

    def state(self) -> dict[str, Any]:
        """Hashes of everything, and what was noted of the rounds."""
        cuts = {str(client): key for client, key in sorted(self.cuts.items())}
        return super().state() | {"cuts": cuts}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        super().restore(state)
        self.cuts = {int(client): key for client, key in state["cuts"].items()}

    def stored(self) -> list[str]:
        """Hashes of all blobs that the state names."""
        return [*super().stored(), *self.cuts.values()]

    # ----- a device's model -------------------------------------------------------------------------------------------

    def bits(self, client: int) -> bytes:
        """What a device has cut, as it travels."""
        return (
            self.store.get(self.cuts[client])
            if client in self.cuts
            else self.units.pack(self.units.none)
        )

    def cut_of(self, client: int) -> Cut:
        """The same: (units,), bool; not to be written to."""
        key = self.cuts.get(client)
        if key not in self._cuts:
            self._cuts[key] = self.units.read(self.bits(client))
        return self._cuts[key]

    def structure_of(self, client: int) -> Structure:
        """What a device keeps of the model."""
        key = self.cuts.get(client)
        if key not in self._structures:
            self._structures[key] = self.units.structure(self.cut_of(client))
        return self._structures[key]

    def take_cut(self, client: int, bits: bytes) -> bool:
        """Take what a device has cut now; whether that is another cut than before."""
        before, self.cuts[client] = self.bits(client), self.store.put(bits)
        return before != bits

    def plan_for(self, client: int, rank_limit: int) -> AdapterPlan:
        """The adapters of a device."""
        key = (self.cuts.get(client), rank_limit)
        if key not in self._plans:
            bits = self.bits(client) if client in self.cuts else None
            self._plans[key] = trained(self.model.plan, self.settings, rank_limit, bits)
        return self._plans[key]

    def forget_plans(self) -> None:
        """Let go of what was made of cuts that are past."""
        self._plans.clear()
        self._structures.clear()
        self._cuts.clear()

    def part_for(self, client: int, key: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a device has of some tensors of a blob, at every rank: the rows of B and columns of A of what it keeps."""
        if client not in self.cuts:
            return dict(tensors)
        return cut_trained({key: tensors}, self.model.plan, self.structure_of(client))[key]

    def blob_for(self, client: int, key: str, rank_limit: int) -> bytes:
        """One blob of the global adapters as it is sent to a device: its rows and columns, and the first ranks."""
        shapes = self.plan_for(client, rank_limit).shapes()[key]
        own = self.part_for(client, key, self.tensors(key))
        cut = {name: own[name][tuple(map(slice, shape))] for name, shape in shapes.items()}
        return pack_adapters(cut, self.settings.federation.payload)[0]

    # ----- for the summary --------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""
        pruned = {
            str(client): self.units.share(self.cut_of(client)) for client in sorted(self.cuts)
        }
        return super().report() | {"pruned": pruned}
