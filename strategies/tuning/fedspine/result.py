"""Result of FedSpine: global adapters, each device's cut, and the outcome of every round."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from espalier.hf.structured.selection import cut_trained
from espalier.messages.blobs.adapters import Shape, pack_adapters
from espalier.messages.blobs.cut_bits import pack_bits, read_bits
from espalier.methods.tuning.fedspine import STRUCTURE, trained
from espalier.models.adapters import Adapter, AdapterPlan
from espalier.models.groups import Cut, Groups
from espalier.models.plan import block_of_key
from espalier.models.structure import Structure, kind_of, lines_of_groups
from espalier.settings.run import RunSettings
from pruning_kernels.lora.factor_means import KeptFactors
from pruning_kernels.lora.factors import Factors
from strategies.averaging.adapters import AdapterResult
from strategies.fleet import DeviceTime, RoundTime


@dataclass(frozen=True)
class DeviceRound(DeviceTime):
    """Outcome of a round at one device."""

    pruned: float
    """Pruning ratio: removed fraction of the parameters of prunable groups, by the cut bits."""
    rank: int
    importance: float
    """Importance I(B_total), relative to the round's other devices."""
    reward: float
    kept_its_cut: bool
    """True if the device was asked to cut more and cut nothing."""


@dataclass(frozen=True)
class RoundNote(RoundTime):
    """Outcome of a round; times are measured if there is no fleet."""

    DEVICE: ClassVar[type[DeviceTime]] = DeviceRound


class RefinedResult(AdapterResult):
    """Global adapters of the whole model, and a cut of the model for each device."""

    NOTE = RoundNote

    def __init__(self, settings: RunSettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self.groups = Groups.of(self.model.plan)
        self.cuts: dict[int, str] = {}
        """Hash of each device's cut bits; devices without a cut have no entry."""
        self._plans: dict[tuple[str | None, int], AdapterPlan] = {}
        self._structures: dict[str | None, Structure] = {}
        self._cuts: dict[str | None, Cut] = {}

    def state(self) -> dict[str, Any]:
        """Return all hashes, and the entries of the rounds."""
        cuts = {str(client): key for client, key in sorted(self.cuts.items())}
        return super().state() | {"cuts": cuts}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self.cuts = {int(client): key for client, key in state["cuts"].items()}

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return [*super().stored(), *self.cuts.values()]

    # ----- model of a device ----------------------------------------------------------------------

    def bits(self, client: int) -> bytes:
        """Return a device's cut as it is sent."""
        if client not in self.cuts:
            return pack_bits(self.groups.none)
        return self.store.get(self.cuts[client])

    def cut_of(self, client: int) -> Cut:
        """Return a device's cut; read-only, because it is cached."""
        # By hash: devices with the same cut share the entry.
        key = self.cuts.get(client)
        if key not in self._cuts:
            self._cuts[key] = read_bits(self.groups, self.bits(client))
        return self._cuts[key]

    def structure_of(self, client: int) -> Structure:
        """Return the structure of a device's smaller model."""
        key = self.cuts.get(client)
        if key not in self._structures:
            self._structures[key] = self.groups.structure(self.cut_of(client))
        return self._structures[key]

    def take_cut(self, client: int, bits: bytes) -> bool:
        """Store a device's cut; return True if it differs from the one before."""
        # The old bits are read before the new hash replaces them.
        before, self.cuts[client] = self.bits(client), self.store.put(bits)
        return before != bits

    def plan_for(self, client: int, rank_limit: int) -> AdapterPlan:
        """Return the adapters in the shapes of a device's smaller model."""
        key = (self.cuts.get(client), rank_limit)
        if key not in self._plans:
            # None leaves the plan of the whole model.
            bits = self.bits(client) if client in self.cuts else None
            self._plans[key] = trained(self.model.plan, self.settings, rank_limit, bits)
        return self._plans[key]

    def forget_plans(self) -> None:
        """Clear the caches, which hold entries of outdated cuts."""
        self._plans.clear()
        self._structures.clear()
        self._cuts.clear()

    def part_for(self, client: int, key: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a device's part of some tensors of a blob, at full rank.

        These are the rows of B and columns of A that the device keeps.
        """
        # Nothing is cut yet.
        if client not in self.cuts:
            return dict(tensors)
        return cut_trained({key: tensors}, self.model.plan, self.structure_of(client))[key]

    def blob_for(self, client: int, key: str, rank_limit: int) -> bytes:
        """Return one blob of the global adapters as it is sent to a device.

        It has the device's rows and columns, and its first ranks.
        """
        shapes = self.plan_for(client, rank_limit).shapes()[key]
        tensors = self.part_for(client, key, self.tensors(key))
        cut = {name: tensors[name][tuple(map(slice, shape))] for name, shape in shapes.items()}
        # No error feedback: the shapes change with each cut, so a residual would not fit.
        return pack_adapters(cut, self.settings.federation.wire_dtype)[0]

    def along(self, client: int) -> dict[str, bytes]:
        """Return the bits of a device's cut, which determine the shapes."""
        return {STRUCTURE: self.bits(client)}

    def beginnings(self, limits: Iterable[int]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield the global adapters: no device begins with larger numbers than these."""
        # Parts of these, for each device.
        for key in self.blobs:
            yield key, self.tensors(key)

    def kept(self, client: int, key: str, adapter: Adapter) -> Tensor:
        """Return the rows or columns of an adapted matrix that a device keeps: bool.

        A matrix is cut only on the side of its groups or channels.
        """
        index = block_of_key(key)
        assert index is not None
        name = adapter.linear.name
        kind, _ = kind_of(name)
        kept = ~self.cut_of(client)[self.groups.at(index, kind)]
        # Rows or columns of each kept group; a group of attention has several.
        lines = lines_of_groups(self.groups.plan, name, kind, len(kept))
        mask = np.zeros(lines.size, np.bool_)
        mask[lines[kept]] = True
        return torch.from_numpy(mask)

    def part_of(self, key: str, adapter: Adapter, keep: Tensor) -> KeptFactors | None:
        """Return the part of the last global update on rows or columns ``keep``.

        It is None if the update is zero, or if ``keep`` is empty.
        """
        tensors = self.tensors(key)
        a = tensors[adapter.name_a]
        b = tensors[adapter.name_b]
        # A zero update would only use up rank.
        if not (bool(b.any()) and bool(keep.any())):
            return None
        _, side = kind_of(adapter.linear.name)
        factors = (b[keep], a) if side == 0 else (b, a[:, keep])
        return KeptFactors(Factors(*factors, adapter.scaling), keep)

    def spread(self, client: int, key: str, name: str, change: Tensor, shape: Shape) -> Tensor:
        """Return the change with a device's rows or columns at their places in the whole matrix."""
        index = block_of_key(key)
        adapters = self.adapters.blocks.get(index, ()) if index is not None else ()
        adapter = next((candidate for candidate in adapters if name in candidate.shapes()), None)
        if adapter is None:
            return super().spread(client, key, name, change, shape)
        _, side = kind_of(adapter.linear.name)
        # The other factor is whole on every device.
        if name != (adapter.name_b, adapter.name_a)[side]:
            return super().spread(client, key, name, change, shape)
        keep = self.kept(client, key, adapter)
        padded = change.new_zeros(shape)
        if side == 0:
            padded[keep, : change.shape[1]] = change
        else:
            padded[: change.shape[0], keep] = change
        return padded

    # ----- summary --------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
        clients = sorted(self.cuts)
        pruned = {str(client): self.groups.ratio(self.cut_of(client)) for client in clients}
        return super().report() | {"pruned": pruned}
