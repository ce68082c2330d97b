"""Global adapters of a run, blob by blob: the averaged tensors, and their form on the wire.

The data are in the checkpoint's blobs; this object has the hashes. The global tensors are float32.
Clients begin with values that are rounded to the wire dtype, or with the rounded difference from
the first adapters. Every client can make the first adapters, even if it missed rounds or lost its
private state. With error feedback, the rounding error is added to the next values that are sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.adapters import (
    Shape,
    differences,
    pack_adapters,
    sums,
    unpack_adapters,
)
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.tensors import of_all_rounds, trained
from espalier.models.adapters import AdapterPlan, Tensors, is_folded
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from espalier.training.initial_values import initial_values
from strategies.averaging.written_adapters import WrittenAdapters
from strategies.base.method import RunResult
from strategies.fleet import RoundTime


class AdapterResult(RunResult):
    """Global adapters of a run; their tensors are in ``store``.

    ``adapters`` is their plan; None for those that the run's clients train. ``first`` returns the
    initial values; None for those of the run's seed.
    """

    STATE: ClassVar[tuple[str, ...]] = ("blobs", "sent", "lost")
    NOTE: ClassVar[type[RoundTime]] = RoundTime

    def __init__(
        self,
        settings: RunSettings,
        model: OpenedModel,
        store: BlobStore,
        adapters: AdapterPlan | None = None,
        first: Callable[[], Tensors] | None = None,
    ) -> None:
        self.settings = settings
        self.job = settings.of(AdapterAveraging)
        self.model = model
        self.store = store
        self.adapters: AdapterPlan = trained(model.plan, settings) if adapters is None else adapters
        # Initial values are stored once: differences and dead ranks refer to them in every round.
        initial = self._begun(first)
        self._first = {key: store.put(save(dict(tensors))) for key, tensors in initial.items()}
        self.blobs: dict[str, str] = dict(self._first)
        """Hash of each blob's tensors in the store, by blob key."""
        self.sent: dict[str, dict[str, str]] = {}
        """Hash of each blob as it is sent, by rank limit and key."""
        self.lost: dict[str, dict[str, str]] = {}
        """Hash of each blob's accumulated rounding error, by rank limit and key.

        Empty without error feedback.
        """
        self.rounds: list[RoundTime] = []
        """Time of each round; empty without a virtual clock."""

    def _begun(self, first: Callable[[], Tensors] | None) -> Tensors:
        """Return the initial values."""
        return first() if first else initial_values(self.model, self.adapters, self.settings.seed)

    def state(self) -> dict[str, Any]:
        """Return all hashes, and the entries of the rounds."""
        return super().state() | {"rounds": [note.to_json() for note in self.rounds]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self.rounds = [self.NOTE.from_json(note) for note in state["rounds"]]

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        # Everything that the checkpoint names must survive the deletion of unused blobs.
        sending = [*self.sent.values(), *self.lost.values()]
        return [*self.blobs.values(), *(key for keys in sending for key in keys.values())]

    def note_round(self, note: RoundTime) -> None:
        """Record the time of a round."""
        self.rounds = [*self.rounds, note]

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Return the global tensors of one blob: float32, by canonical name."""
        return load(self.store.get(self.blobs[key]))

    def replace(
        self, folded: Iterable[tuple[str, Mapping[str, Tensor]]], rank_limits: Iterable[int]
    ) -> None:
        """Store new global tensors, blob by blob, and pack them for clients of these rank limits.

        Packed blobs and rounding errors of other limits are discarded.
        """
        # Sorted, so that equal runs write equal checkpoints.
        limits = sorted(set(rank_limits))
        self.sent = {}
        # Residuals belong to what a receiver has; those of other limits would be applied to other
        # values.
        self.lost = {name: self.lost[name] for name in map(str, limits) if name in self.lost}
        for key, tensors in folded:
            first = self._first_tensors(key)
            alive = _alive(tensors, first)
            self.blobs[key] = self.store.put(save(alive))
            # Global values stay exact; only what is sent is rounded.
            for limit in limits:
                self._pack(key, alive, first, limit)

    def _pack(
        self, key: str, tensors: Mapping[str, Tensor], first: Mapping[str, Tensor], limit: int
    ) -> None:
        """Pack one blob for clients of a rank limit; differences are taken from ``first``."""
        federation = self.settings.federation
        name = str(limit)
        # Rounding error of the last values that were sent at this rank limit.
        before = self.lost.get(name, {}).get(key) if self.job.feeds_back else None
        residuals = load(self.store.get(before)) if before else None
        cut = self._cut(key, tensors, limit)
        # Both cut to the limit, so that the first ranks of both are compared.
        if self.job.pushes_differences(federation):
            cut = differences(cut, self._cut(key, first, limit))
        blob, lost = pack_adapters(cut, federation.wire_dtype, residuals)
        self.sent.setdefault(name, {})[key] = self.store.put(blob)
        if self.job.feeds_back and lost:
            self.lost.setdefault(name, {})[key] = self.store.put(save(lost))

    def _cut(self, key: str, tensors: Mapping[str, Tensor], limit: int) -> dict[str, Tensor]:
        """Return the part of one blob's tensors for clients of a rank limit."""
        shapes = self.adapters.limited(limit).shapes()[key]
        cut = {
            # The first ranks of A and B: leading rows and columns.
            name: tensors[name][tuple(slice(size) for size in shape)]
            for name, shape in shapes.items()
        }
        # Folded updates are never cut: all clients have the same base.
        folded = {name: value for name, value in tensors.items() if is_folded(name)}
        return cut | folded

    def _first_tensors(self, key: str) -> dict[str, Tensor]:
        """Read the initial tensors of one blob, so that memory holds one blob only."""
        return load(self.store.get(self._first[key]))

    def blob(self, key: str, limit: int) -> bytes:
        """Return one blob as it is sent to clients of a rank limit."""
        return self.store.get(self.sent[str(limit)][key])

    def received(self, key: str, limit: int) -> dict[str, Tensor]:
        """Return the tensors that clients have after they received ``blob``: float32, by name."""
        # As a client decodes them, including the rounding.
        federation = self.settings.federation
        shapes = self.adapters.limited(limit).shapes()[key]
        tensors = unpack_adapters(shapes, self.blob(key, limit), federation.wire_dtype)
        # A client adds differences to its own first values.
        differ = self.job.pushes_differences(federation)
        return sums(self._cut(key, self._first_tensors(key), limit), tensors) if differ else tensors

    # ----- clients, whose adapters may differ from the global ones in a subclass ------------------

    def plan_for(self, client: int, rank_limit: int) -> AdapterPlan:
        """Return the adapters of a client of a rank limit."""
        return self.adapters.limited(rank_limit)

    def blob_for(self, client: int, key: str, rank_limit: int) -> bytes:
        """Return one blob of the global adapters as it is sent to a client."""
        return self.blob(key, rank_limit)

    def along(self, client: int) -> dict[str, bytes]:
        """Return blobs that each request to a client has after round 1, for its shapes."""
        return {}

    def beginnings(self, limits: Iterable[int]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield the tensors with which clients of these rank limits begin, blob by blob."""
        for limit in sorted(set(limits)):
            for key in self.blobs:
                # The largest of these bounds what training can reach.
                yield key, self.received(key, limit)

    def part_for(self, client: int, key: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a client's part of some global tensors of a blob, at full rank."""
        return dict(tensors)

    def spread(self, client: int, key: str, name: str, change: Tensor, shape: Shape) -> Tensor:
        """Return a client's change of a tensor in the global ``shape``, padded with zeros."""
        padded = change.new_zeros(shape)
        padded[tuple(map(slice, change.shape))] = change
        return padded

    # ----- result ---------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
        ranks = sorted({adapter.rank for _, adapter in self.adapters})
        trained = of_all_rounds(self.adapters, self.settings).num_parameters
        waiting = [note.waiting_seconds for note in self.rounds]
        times = {"waiting_seconds": sum(waiting) / len(waiting)} if waiting else {}
        return {"trained_parameters": trained, "ranks": ranks, **times}

    def written(self) -> WrittenAdapters:
        """Return the adapters as they are written for peft."""
        return WrittenAdapters(
            self.adapters, list(self.blobs), self.tensors, self.rounds, self.report()
        )


def _alive(tensors: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one blob's tensors, with dead ranks revived.

    A rank that is zero in both A and B has no gradient and would stay zero. Its row of A is reset
    to that of ``first``. The update ``B A`` does not change, because the column of B is zero.
    """
    alive = dict(tensors)
    for name in [name for name in alive if name.endswith(".lora_a")]:
        a = alive[name]
        b = alive[name.removesuffix("_a") + "_b"]
        # (rank,): both the row of A and the column of B are zero.
        dead = ~(a != 0).any(dim=1) & ~(b != 0).any(dim=0)
        alive[name] = torch.where(dead[:, None], first[name], a)
    return alive
