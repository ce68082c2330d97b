"""The result of FedSODA: a sub-model, LoRA of its emulator and of its adapter, and the adapter plugged into the full model.

The sub-model is written into the run directory, ``sub-model/``, in the layout of Hugging Face, and offered to clients as the
files that lie there. It follows from the base model, the settings and the blocks that go, so a checkpoint names these alone.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from espalier.modeling.edits import WeightEdit, dense
from espalier.modeling.export import export_edited
from espalier.modeling.opened import OpenedModel, open_model
from espalier.modeling.quantised_folder import write_quantised
from espalier.modeling.structured.export import export_structured, require_form
from espalier.modeling.structured.similar_groups import Group, index_map
from espalier.settings.fedsoda import FedSodaSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from espalier.training.alignment import Places
from espalier.wire.adapters import AdapterPlan
from espalier.wire.fedsoda import emulator_adapters
from espalier.wire.model_folder import FILES, Manifest
from espalier.wire.payload import MOST_BLOBS, block_key
from espalier.wire.structure import Structure
from espalier.wire.tuning import trained
from strategies.results.adapters import AdapterResult

CHUNK = 16 * 1024 * 1024


class SubModelResult:
    """What FedSODA leads to.

    Parameters
    ----------
    settings : of the run
    base : the full model
    store : of the checkpoint
    folder : where the sub-model is written
    """

    def __init__(
        self, settings: RunSettings, base: OpenedModel, store: BlobStore, folder: Path
    ) -> None:
        self.settings = settings
        self.base = base
        self.store = store
        self.folder = folder
        self.job = settings.of(FedSodaSettings)
        self.dropped: list[int] | None = None
        """Blocks of the full model that go; None before that is decided."""
        self.starts: list[int] = []
        """First blocks of the pruned groups, in the full model."""
        self.distances: list[float] = []
        """By which they were chosen."""
        self.aligned = 0
        """The round before which the emulator was last aligned."""

    # ----- the sub-model ----------------------------------------------------------------------------------------------

    def decide(self, dropped: list[int], starts: list[int], distances: list[float]) -> None:
        """Make the sub-model without some blocks."""
        self.dropped = dropped
        self.starts = starts
        self.distances = distances
        write_sub_model(
            self.base, self.kept, self.folder, self.settings
        )  # anew: what lies there may be of a run that was killed
        self._open()

    @property
    def kept(self) -> list[int]:
        """Blocks of the full model that the sub-model has, in order."""
        assert self.dropped is not None
        return [block.index for block in self.base.plan.blocks if block.index not in self.dropped]

    @property
    def groups(self) -> list[Group]:
        """The index map of section 4.3."""
        return index_map(self.starts, self.dropped or [])

    def places(self) -> Places:
        """Which outputs of the sub-model are held against which of the full one."""
        between = {group.smaller: group.full + self.job.group_layers for group in self.groups}
        return Places(
            between, (self._emulator[-1], self.job.emulator_of(len(self.base.plan.blocks))[-1])
        )

    @property
    def _emulator(self) -> range:
        return self.job.emulator_of(len(self.kept))

    @property
    def aligned_blocks(self) -> list[int]:
        """Blocks of the sub-model whose LoRA is aligned."""
        return (
            list(self._emulator)
            if self.job.aligned == "all"
            else [group.smaller for group in self.groups]
        )

    def _open(self) -> None:
        """Open the sub-model."""
        self.model = open_model(str(self.folder))
        self.manifest = manifest_of(self.folder, self.settings.part_bytes)
        self.adapter = AdapterResult(self.settings, self.model, self.store)
        self.emulator: AdapterResult | None = None
        if self.job.aligns and self.aligned_blocks:
            plan = emulator_adapters(self.model.plan, self.settings, self.aligned_blocks)
            self.emulator = AdapterResult(self.settings, self.model, self.store, plan)

    def piece(self, index: int) -> bytes:
        """One piece of the sub-model's files."""
        start = index * self.manifest.piece_bytes
        return b"".join(
            _bytes_between(
                self.folder, self.manifest, start, start + self.manifest.piece_size(index)
            )
        )

    # ----- a checkpoint -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        if self.dropped is None:
            return {"dropped": None}
        return {
            "dropped": self.dropped,
            "starts": self.starts,
            "distances": self.distances,
            "sub-model": self.manifest.sha256,
            "aligned": self.aligned,
            "adapter": self.adapter.state(),
            "emulator": self.emulator.state() if self.emulator else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        if state["dropped"] is None:
            return
        self.aligned = state["aligned"]
        self.dropped = state["dropped"]
        self.starts = state["starts"]
        self.distances = state["distances"]
        if not self.folder.exists():
            write_sub_model(self.base, self.kept, self.folder, self.settings)
        self._open()
        if self.manifest.sha256 != state["sub-model"]:
            raise Mistake(
                f"{self.folder}: is not the sub-model that the run began with; remove it, so that"
                " it is made again, with the versions of the libraries that run.json names"
            )
        self.adapter.restore(state["adapter"])
        if self.emulator:
            self.emulator.restore(state["emulator"])

    def stored(self) -> list[str]:
        """Hashes of all blobs that the state names."""
        if self.dropped is None:
            return []
        return [*self.adapter.stored(), *(self.emulator.stored() if self.emulator else [])]

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""
        return self.adapter.report() | {
            "dropped_blocks": self.dropped,
            "groups": [[group.full, group.smaller] for group in self.groups],
            "sub_model_bytes": self.manifest.num_bytes,
            "emulator_parameters": self.emulator.adapters.num_parameters if self.emulator else 0,
        }

    def plugged(self) -> "Plugged":
        """The adapter where it belongs in the full model (algorithm 2, line 22); the emulator's LoRA is left behind."""
        return Plugged(self.settings, self.base, self.adapter, self.kept, self.report())

    def sub_edits(self, index: int) -> Mapping[str, WeightEdit]:
        """What merges adapter and emulator's LoRA into one block of the sub-model."""
        emulated = self.emulator.edits(index) if self.emulator and self.aligned else {}
        return {**emulated, **self.adapter.edits(index)}


class Plugged:
    """Adapters of the sub-model under the full model's numbers: read as an ``AdapterResult`` is."""

    def __init__(
        self,
        settings: RunSettings,
        base: OpenedModel,
        of: AdapterResult,
        kept: list[int],
        report: dict[str, Any],
    ) -> None:
        self.adapters: AdapterPlan = trained(base.plan, settings)
        self.rounds = of.rounds
        self._of = of
        self._report = report
        self._keys = {block_key(kept[index]): block_key(index) for index in of.adapters.blocks}
        self._places = {kept[index]: index for index in of.adapters.blocks}

    @property
    def blobs(self) -> dict[str, str]:
        """Hash of each blob's tensors, by the full model's key."""
        return {full: self._of.blobs[key] for full, key in self._keys.items()}

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Tensors of one blob: float32, by canonical name."""
        return load(self._of.store.get(self.blobs[key]))

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """What merges the adapter into one block's dense weights; nothing in blocks of the emulator."""
        return self._of.edits(self._places[index]) if index in self._places else {}

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""
        return self._report


def write_sub_model(
    base: OpenedModel, kept: list[int], target: Path, settings: RunSettings
) -> None:
    """Write some blocks of a base as a model of its own, in NF4 or as they are."""
    job = settings.of(FedSodaSettings)
    whole = len(kept) == len(base.plan.blocks)
    model = base if whole else _without_others(base, kept)
    if job.emulator == "nf4":
        write_quantised(model, target, settings.training.double_quantisation)
    elif whole:
        export_edited(model, dense, target)
    else:
        export_structured(model, dense, target, "plain")


def require_sub_model(base: OpenedModel, num_dropped: int) -> None:
    """Refuse a base of which a model without some blocks could not be written.

    Raises
    ------
    Mistake
        It says why.
    """
    if num_dropped:
        require_form(
            _without_others(base, list(range(len(base.plan.blocks) - num_dropped))), "plain"
        )


def _without_others(base: OpenedModel, kept: list[int]) -> OpenedModel:
    return OpenedModel(base.directory, Structure.whole(base.plan).with_blocks(kept))


def manifest_of(folder: Path, piece_bytes: int) -> Manifest:
    """What clients are offered of a folder: all its files that a model has."""
    names = sorted(file.name for file in folder.iterdir() if FILES.fullmatch(file.name))
    sizes = [(folder / name).stat().st_size for name in names]
    hashes = [_sha256_of(folder / name) for name in names]
    whole = Manifest(tuple(names), tuple(sizes), tuple(hashes), piece_bytes, ())
    starts = range(0, whole.num_bytes, piece_bytes)
    if len(starts) > MOST_BLOBS:
        raise Mistake(
            f"part-bytes = {piece_bytes}: the sub-model would travel in {len(starts)} pieces, at"
            f" most {MOST_BLOBS} may; set it to {-(-whole.num_bytes // MOST_BLOBS)} or more"
        )
    pieces = [
        _sha256(_bytes_between(folder, whole, start, min(start + piece_bytes, whole.num_bytes)))
        for start in starts
    ]
    return Manifest(whole.names, whole.sizes, whole.file_sha256, piece_bytes, tuple(pieces))


def _bytes_between(folder: Path, manifest: Manifest, start: int, stop: int) -> Iterator[bytes]:
    """Bytes of the folder's files, one after the other, in chunks."""
    before = 0
    for name, size in zip(manifest.names, manifest.sizes, strict=True):
        first = max(start - before, 0)
        last = min(stop - before, size)
        if first < last:
            with open(folder / name, "rb") as file:
                file.seek(first)
                for place in range(first, last, CHUNK):
                    yield file.read(min(CHUNK, last - place))
        before += size


def _sha256(chunks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
