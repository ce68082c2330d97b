"""Result of FedSODA: a sub-model, LoRA of its emulator and adapter, and the plugged-in adapter.

The sub-model is written to ``sub-model/`` in the run directory in Hugging Face format, and its
files are offered to clients. It follows from the base model, the settings and the dropped blocks,
so a checkpoint stores only these.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from espalier.errors import InputError
from espalier.hf.export.chat_template import add_chat_template
from espalier.hf.export.model import export_edited
from espalier.hf.group_scores.similar_groups import Group, index_map
from espalier.hf.nf4.folder import write_quantised
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.edits import WeightEdit, dense
from espalier.hf.structured.export import export_structured, require_form
from espalier.messages.blobs.model_pieces import FILES, Manifest
from espalier.messages.tensor_blobs import MAX_BLOBS
from espalier.methods.tuning.adapters.tensors import trained
from espalier.methods.tuning.fedsoda import FedSodaSettings, emulator_adapters
from espalier.models.plan import block_key
from espalier.models.structure import Structure
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from espalier.training.alignment import Places
from strategies.averaging.adapters import AdapterResult
from strategies.averaging.written_adapters import WrittenAdapters
from strategies.base.method import RunResult

CHUNK = 16 * 1024 * 1024


class SubModelResult(RunResult):
    """Result of FedSODA: the sub-model, in ``folder``, and its LoRA, in ``store``."""

    ADAPTERS: ClassVar[type[AdapterResult]] = AdapterResult
    """Class of the LoRA of emulator and adapter."""

    def __init__(
        self, settings: RunSettings, base: OpenedModel, store: BlobStore, folder: Path
    ) -> None:
        self.settings = settings
        self.base = base
        self.store = store
        self.folder = folder
        self.job = settings.of(FedSodaSettings)
        self.dropped: list[int] | None = None
        """Dropped blocks of the full model; None before the decision."""
        self.starts: list[int] = []
        """First blocks of the pruned groups, in the full model."""
        self.distances: list[float] = []
        """Angular distances that decided the groups."""
        self.aligned = 0
        """Round before which the emulator was last aligned."""

    # ----- sub-model ------------------------------------------------------------------------------

    def decide(self, dropped: list[int], starts: list[int], distances: list[float]) -> None:
        """Write and open the sub-model without the dropped blocks."""
        self.dropped = dropped
        self.starts = starts
        self.distances = distances
        # Write it again in any case: existing files may be from a run that was killed.
        write_sub_model(self.base, self.kept, self.folder, self.settings)
        self._open()

    @property
    def kept(self) -> list[int]:
        """Blocks of the full model that remain in the sub-model, in order."""
        assert self.dropped is not None
        return [block.index for block in self.base.plan.blocks if block.index not in self.dropped]

    @property
    def groups(self) -> list[Group]:
        """Index map of section 4.3."""
        return index_map(self.starts, self.dropped or [])

    def places(self) -> Places:
        """Return the outputs of sub-model and full model that alignment compares."""
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
        if self.job.drop == "uniform":
            return list(self._emulator)
        return [group.smaller for group in self.groups]

    def _open(self) -> None:
        """Open the sub-model, and make the initial adapters."""
        manifest = manifest_of(self.folder, self.settings.part_bytes)
        self.begin(open_model(str(self.folder)), manifest)

    def begin(self, model: OpenedModel, manifest: Manifest) -> None:
        """Take this sub-model, and make the initial adapters."""
        self.model = model
        self.manifest = manifest
        self.adapter = self.ADAPTERS(self.settings, model, self.store)
        self.emulator: AdapterResult | None = None
        if self.job.aligns and self.aligned_blocks:
            plan = emulator_adapters(model.plan, self.settings, self.aligned_blocks)
            self.emulator = self.ADAPTERS(self.settings, model, self.store, plan)

    def piece(self, index: int) -> bytes:
        """Return one piece of the sub-model's files."""
        start = index * self.manifest.piece_bytes
        stop = start + self.manifest.piece_size(index)
        return b"".join(_bytes_between(self.folder, self.manifest, start, stop))

    def note_alignment(self, server_round: int) -> None:
        """Record that the emulator was aligned before a round."""
        self.aligned = server_round

    # ----- checkpoint -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
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
        """Restore the state that ``state`` returned; refuse another sub-model than the run's."""
        if state["dropped"] is None:
            return
        self.aligned = state["aligned"]
        self.dropped = state["dropped"]
        self.starts = state["starts"]
        self.distances = state["distances"]
        # It was removed; it is made again and must have the same hash.
        if not self.folder.exists():
            write_sub_model(self.base, self.kept, self.folder, self.settings)
        self._open()
        if self.manifest.sha256 != state["sub-model"]:
            raise InputError(
                f"{self.folder}: is not the sub-model that the run began with; remove it, so that"
                " it is made again, with the versions of the libraries that run.json names"
            )
        self.adapter.restore(state["adapter"])
        if self.emulator:
            self.emulator.restore(state["emulator"])

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        if self.dropped is None:
            return []
        return [*self.adapter.stored(), *(self.emulator.stored() if self.emulator else [])]

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
        return self.adapter.report() | {
            "dropped_blocks": self.dropped,
            "groups": [[group.full, group.smaller] for group in self.groups],
            "sub_model_bytes": self.manifest.num_bytes,
            "emulator_parameters": self.emulator.adapters.num_parameters if self.emulator else 0,
        }

    def written(self) -> WrittenAdapters:
        """Return the adapter at its place in the full model, without the emulator's LoRA."""
        # Blocks of the sub-model, by the block's key in the full model.
        places = {block_key(self.kept[index]): index for index in self.adapter.adapters.blocks}
        return WrittenAdapters(
            trained(self.base.plan, self.settings),
            list(places),
            lambda key: self.adapter.tensors(block_key(places[key])),
            self.adapter.rounds,
            self.report(),
        )

    def sub_edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits that merge all LoRA into one block of the sub-model."""
        # An emulator that was never aligned has LoRA without effect.
        emulated = self.emulator.written().edits(index) if self.emulator and self.aligned else {}
        return {**emulated, **self.adapter.written().edits(index)}


def write_sub_model(
    base: OpenedModel, kept: list[int], target: Path, settings: RunSettings
) -> None:
    """Write some blocks of a base model as a model, in NF4 or in the base's dtype."""
    job = settings.of(FedSodaSettings)
    model = sub_model_of(base, kept)
    if job.emulator == "nf4":
        write_quantised(model, target)
    elif model is base:
        # Nothing was dropped: the base is copied with its own structure.
        export_edited(model, dense, target)
    else:
        export_structured(model, dense, target, "plain")
    add_chat_template(settings.task, base, target)


def require_sub_model(base: OpenedModel, num_dropped: int) -> None:
    """Raise InputError if the base model cannot be written without some blocks."""
    if num_dropped:
        kept = list(range(len(base.plan.blocks) - num_dropped))
        require_form(sub_model_of(base, kept), "plain")


def sub_model_of(base: OpenedModel, kept: list[int]) -> OpenedModel:
    """Return a model with only the blocks ``kept`` of the base; the base if it has no others."""
    if len(kept) == len(base.plan.blocks):
        return base
    return OpenedModel(base.directory, Structure.whole(base.plan).with_blocks(kept))


def manifest_of(folder: Path, piece_bytes: int) -> Manifest:
    """Return the manifest of a folder: the model files that are offered to clients.

    Raises InputError if ``part-bytes`` is so small that there would be too many pieces.
    """
    names = sorted(file.name for file in folder.iterdir() if FILES.fullmatch(file.name))
    sizes = [(folder / name).stat().st_size for name in names]
    hashes = []
    for name in names:
        with open(folder / name, "rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    manifest = Manifest(
        names=names, sizes=sizes, file_sha256=hashes, piece_bytes=piece_bytes, piece_sha256=[]
    )
    starts = range(0, manifest.num_bytes, piece_bytes)
    # Contracts bound the number of blobs of a message.
    if len(starts) > MAX_BLOBS:
        raise InputError(
            f"part-bytes = {piece_bytes}: the sub-model would travel in {len(starts)} pieces, at"
            f" most {MAX_BLOBS} may; set it to {-(-manifest.num_bytes // MAX_BLOBS)} or more"
        )
    pieces = []
    for start in starts:
        digest = hashlib.sha256()
        # Pieces cut across files, so their hashes are made of the concatenation.
        end = min(start + piece_bytes, manifest.num_bytes)
        for chunk in _bytes_between(folder, manifest, start, end):
            digest.update(chunk)
        pieces.append(digest.hexdigest())
    return manifest.model_copy(update={"piece_sha256": pieces})


def _bytes_between(folder: Path, manifest: Manifest, start: int, stop: int) -> Iterator[bytes]:
    """Yield a range of the concatenated files of the folder, in chunks."""
    before = 0
    for name, size in zip(manifest.names, manifest.sizes, strict=True):
        # Range within this file.
        first = max(start - before, 0)
        last = min(stop - before, size)
        if first < last:
            with open(folder / name, "rb") as file:
                file.seek(first)
                for place in range(first, last, CHUNK):
                    yield file.read(min(CHUNK, last - place))
        before += size
