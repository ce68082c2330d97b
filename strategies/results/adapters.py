"""The global adapters of a run, blob by blob: what the clients' adapters were folded to, and what is sent of it.

Everything lies in the checkpoint's blobs; here are the hashes. The global tensors are kept in float32. Clients begin with what
the payload's dtype leaves of them, or of their difference from the first ones: these any client can make, also one that missed
rounds or lost its private state. With error feedback what is lost is added the next time.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.modeling.adapters import factors_of, merged
from espalier.modeling.edits import WeightEdit
from espalier.modeling.opened import OpenedModel
from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from espalier.training.initial import initial_values
from espalier.wire.adapter_payload import differences, pack_adapters, sums, unpack_adapters
from espalier.wire.adapters import AdapterPlan, Tensors
from espalier.wire.payload import block_key
from espalier.wire.tuning import trained
from strategies.results.timed import RoundTime, seconds_of_all

STATE = ("blobs", "sent", "lost")
"""Attributes that a checkpoint keeps as they are."""


class Adapters(Protocol):
    """Adapters of a model, as they are written, merged and measured."""

    adapters: AdapterPlan

    @property
    def rounds(self) -> Sequence[RoundTime]:
        """What each round took by a fleet's clock; empty without one."""

    @property
    def blobs(self) -> Mapping[str, str]:
        """Hash of each blob's tensors, by blob key."""

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Tensors of one blob: float32, by canonical name."""

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """What merges the adapters into one block's dense weights."""

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""


class AdapterResult:
    """The global adapters.

    Parameters
    ----------
    settings : of the run
    model : the base model
    store : where tensors are kept, for a run the checkpoint's blobs
    adapters : which there are; None: those that the run's clients train
    first : what the run begins with; None: as the run's seed makes it
    """

    NOTE: ClassVar[type[RoundTime]] = RoundTime

    def __init__(
        self,
        settings: RunSettings,
        model: OpenedModel,
        store: BlobStore,
        adapters: AdapterPlan | None = None,
        first: Tensors | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.store = store
        self.adapters: AdapterPlan = trained(model.plan, settings) if adapters is None else adapters
        begun = initial_values(model, self.adapters, settings.seed) if first is None else first
        self._first = {key: store.put(save(dict(tensors))) for key, tensors in begun.items()}
        self.blobs: dict[str, str] = dict(self._first)
        """Hash of each blob's tensors in the store, by blob key."""
        self.sent: dict[str, dict[str, str]] = {}
        """Hash of each blob as it is sent to the clients of a rank limit, by the limit and the key."""
        self.lost: dict[str, dict[str, str]] = {}
        """Hash of what sending lost so far, likewise; empty without error feedback."""
        self.rounds: list[RoundTime] = []
        """What each round took; empty where no clock tells."""

    def state(self) -> dict[str, Any]:
        """Hashes of everything, and what was noted of the rounds."""
        return {name: getattr(self, name) for name in STATE} | {
            "rounds": [note.to_json() for note in self.rounds]
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        for name in STATE:
            setattr(self, name, state[name])
        self.rounds = [self.NOTE.from_json(note) for note in state["rounds"]]

    def stored(self) -> list[str]:
        """Hashes of all blobs that the state names."""
        sending = [*self.sent.values(), *self.lost.values()]
        return [*self.blobs.values(), *(key for keys in sending for key in keys.values())]

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Global tensors of one blob: float32, by canonical name."""
        return load(self.store.get(self.blobs[key]))

    def replace(
        self, folded: Iterable[tuple[str, Mapping[str, Tensor]]], rank_limits: Iterable[int]
    ) -> None:
        """Take new global tensors, blob by blob, and make what is sent of them to clients of these rank limits.

        What was sent to clients of other limits, and what that lost, is forgotten.
        """
        limits = sorted(set(rank_limits))
        self.sent = {}
        self.lost = {name: self.lost[name] for name in map(str, limits) if name in self.lost}
        for key, tensors in folded:
            first = self._first_tensors(key)
            alive = _alive(tensors, first)
            self.blobs[key] = self.store.put(save(alive))
            for limit in limits:
                self._pack(key, alive, first, limit)

    def _pack(
        self, key: str, tensors: Mapping[str, Tensor], first: Mapping[str, Tensor], limit: int
    ) -> None:
        """Make what is sent of one blob's tensors to clients of a rank limit; ``first`` are those that the run began with."""
        federation = self.settings.federation
        job = self.settings.of(AdapterAveraging)
        name = str(limit)
        feeds_back = job.feeds_back(federation)
        before = self.lost.get(name, {}).get(key) if feeds_back else None
        residuals = load(self.store.get(before)) if before else None
        cut = self._cut(key, tensors, limit)
        if job.delivers_differences(federation):
            cut = differences(cut, self._cut(key, first, limit))
        blob, lost = pack_adapters(cut, federation.payload, residuals)
        self.sent.setdefault(name, {})[key] = self.store.put(blob)
        if feeds_back and lost:
            self.lost.setdefault(name, {})[key] = self.store.put(save(lost))

    def _cut(self, key: str, tensors: Mapping[str, Tensor], limit: int) -> dict[str, Tensor]:
        """What clients of a rank limit have of one blob's tensors."""
        shapes = self.adapters.limited(limit).shapes()[key]
        return {
            name: tensors[name][tuple(slice(size) for size in shape)]
            for name, shape in shapes.items()
        }

    def _first_tensors(self, key: str) -> dict[str, Tensor]:
        """What the run began with, of one blob: it is in memory for as long as its caller holds it."""
        return load(self.store.get(self._first[key]))

    def blob(self, key: str, limit: int) -> bytes:
        """One blob as it is sent to clients of a rank limit."""
        return self.store.get(self.sent[str(limit)][key])

    def received(self, key: str, limit: int) -> dict[str, Tensor]:
        """What clients of a rank limit have when ``blob`` has arrived: float32, by canonical name."""
        federation = self.settings.federation
        shapes = self.adapters.limited(limit).shapes()[key]
        found = unpack_adapters(shapes, self.blob(key, limit), federation.payload)
        differ = self.settings.of(AdapterAveraging).delivers_differences(federation)
        return sums(self._cut(key, self._first_tensors(key), limit), found) if differ else found

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """What merges the global adapters into one block's dense weights."""
        blocks = [index] if index in self.adapters.blocks else []
        tensors = {number: self.tensors(block_key(number)) for number in blocks}
        return merged(
            lambda number: factors_of(self.adapters, number, tensors.get(number, {})),
            self.adapters.keep_zeros,
        )(index)

    @property
    def seconds(self) -> float:
        """Of all rounds together, each as long as its slowest device; 0 where no clock tells."""
        return seconds_of_all(self.rounds)

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""
        ranks = sorted({adapter.rank for _, adapter in self.adapters})
        waiting = [note.waiting_seconds for note in self.rounds]
        times = {"waiting_seconds": sum(waiting) / len(waiting)} if waiting else {}
        return {"trained_parameters": self.adapters.num_parameters, "ranks": ranks, **times}


def _alive(tensors: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One blob's tensors; where an adapter has lost a rank, in A and in B, its row of A is that of ``first`` again.

    Both parts of such a rank would have no gradient for ever. The update ``B A`` stays, as B's column is zero.
    """
    alive = dict(tensors)
    for name in [name for name in alive if name.endswith(".lora_a")]:
        a = alive[name]
        b = alive[name.removesuffix("_a") + "_b"]
        dead = ~(a != 0).any(dim=1) & ~(b != 0).any(dim=0)
        alive[name] = torch.where(dead[:, None], first[name], a)
    return alive
