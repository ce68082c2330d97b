"""Zeros of each matrix, kept groups of each block, or the updates of an adapter after a run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from espalier.environment.bounded_json import read_json_object
from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened_model import open_model
from espalier.models.structure import GROUP_KINDS, KINDS, RESIDUAL_KINDS, Structure, sizes_of
from espalier.results.finished_run import FinishedRun

MASKS = "masks.safetensors"
STRUCTURE = "structure.json"
BITS = 64
"""Number of weights in one word of a mask."""
WORDS = {
    "groups": "attention groups",
    "channels": "FFN channels",
    "attn_reads": "dimensions that attention reads",
    "attn_writes": "dimensions that attention writes",
    "mlp_reads": "dimensions that the FFN reads",
    "mlp_writes": "dimensions that the FFN writes",
}
"""Name in figures of each kind of group and residual dimension."""
# fmt: off
ORDER = (
    "q", "k", "v", "qkv", "query", "key", "value", "out", "o", "dense", "gate", "up", "gate_up",
    "fc1", "fc2", "down",
)
# fmt: on
"""Order of the matrices of a block, by the last part of their names in most families."""


@dataclass
class HeatMap:
    """Table of one number for each block of the model and each matrix, kind or client."""

    title: str
    columns: list[str]
    rows: dict[int, list[float | None]] = field(default_factory=dict)
    """Values by number of the block in the base model; None for what does not exist."""
    percent: bool = True
    """True if values are fractions, from 0 to 1."""


@dataclass
class Layers:
    """Heat maps of a run, and sentences on what they do not show."""

    maps: list[HeatMap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def layers_of(run: FinishedRun) -> Layers:
    """Return what a run left of each layer; nothing for a run without a result.

    Raises InputError if a file of the result is damaged.
    """
    layers = Layers(notes=list(_notes(run.summary.get("report") or {})))
    if (run.path / MASKS).exists():
        layers.maps.append(_zeros(run.path / MASKS, _shapes(run.model)))
    elif structures := _structures(run):
        layers.maps += _kept(structures)
    elif "groups_of_blocks" in (run.summary.get("report") or {}):
        _add_counts(run, layers)
    if run.adapter is not None:
        layers.maps.append(_updates(run.adapter))
    return layers


@contextmanager
def _tensors(file: Path, framework: str = "numpy") -> Iterator[Any]:
    """Open a file of tensors; raise InputError if it is missing or damaged."""
    try:
        with safe_open(file, framework=framework) as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: cannot be read ({error}); restore it from a backup") from None


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = []
    if gone := report.get("removed_blocks"):
        notes.append(f"Blocks of the base model that were removed: {', '.join(map(str, gone))}.")
    if "width_of_the_base" in report:
        notes.append(
            f"The residual stream of all blocks has {report['width']} dimensions, where the base"
            f" model has {report['width_of_the_base']}."
        )
    if dropped := report.get("dropped_blocks"):
        notes.append(f"Blocks that the clients' sub-model lacks: {', '.join(map(str, dropped))}.")
    return notes


# ----- zeros --------------------------------------------------------------------------------------


def _shapes(model: Path | None) -> dict[str, int]:
    """Return the number of weights of each tensor of a model; only headers are read."""
    found = {}
    for file in sorted(model.glob("*.safetensors")) if model else ():
        with _tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = int(np.prod(tensors.get_slice(name).get_shape()))
    return found


def _zeros(path: Path, sizes: Mapping[str, int]) -> HeatMap:
    """Return the fraction of masked weights of each matrix, with one mask in memory at a time."""
    values: dict[tuple[int, str], float] = {}
    with _tensors(path) as masks:
        for name in masks.keys():  # noqa: SIM118
            words = masks.get_tensor(name)
            # The last word of a mask may have bits without a weight.
            number = sizes.get(name, BITS * words.size)
            values[_place(name)] = float(np.bitwise_count(words).sum() / number)
    return _table("Fraction of the weights that are zero", values)


def _place(parameter: str) -> tuple[int, str]:
    """Return the block of a tensor, and the name of its matrix within the block."""
    words = parameter.split(".")
    number = next((place for place, word in enumerate(words) if word.isdecimal()), None)
    if number is None:
        return 0, parameter
    inner = [word for word in words[number + 1 :] if word not in ("weight", "default")]
    return int(words[number]), ".".join(inner)


def _table(title: str, values: Mapping[tuple[int, str], float], percent: bool = True) -> HeatMap:
    columns = sorted({column for _, column in values}, key=_place_in_block)
    blocks = sorted({block for block, _ in values})
    rows = {block: [values.get((block, column)) for column in columns] for block in blocks}
    return HeatMap(title, [_short(column) for column in columns], rows, percent)


def _place_in_block(matrix: str) -> tuple[bool, int, str]:
    """Return the key by which the matrices of a block are sorted: attention first."""
    name = _short(matrix)
    known = ORDER.index(name) if name in ORDER else len(ORDER)
    return "attn" not in matrix and "attention" not in matrix, known, matrix


def _short(matrix: str) -> str:
    """Return the last part of the name of a matrix, without what all of them have in common."""
    return matrix.rpartition(".")[2].removesuffix("_proj") or matrix


# ----- kept groups --------------------------------------------------------------------------------


def _structures(run: FinishedRun) -> dict[str, Structure]:
    """Return the structures of the result by name: one, or one for each client."""
    found: dict[str, Structure] = {}
    for path in sorted((run.path / "structures").glob("*.json")):
        document = read_json_object(path)
        name = f"client {document.get('client')}"
        found[name] = Structure.from_json(document.get("structure"), str(path))
    if found:
        return found
    places = {"": run.model, **run.client_models}
    for name, place in places.items():
        if place is not None and (file := place / STRUCTURE).is_file():
            found[name] = Structure.from_json(read_json_object(file), str(file))
    return found


def _kept(structures: Mapping[str, Structure]) -> list[HeatMap]:
    """Return the kept fraction of each kind that was cut somewhere.

    One structure gives one map with the kinds as columns, several give a map for each kind with the
    clients as columns.
    """
    kinds = [
        kind for kind in KINDS if any(_is_cut(structure, kind) for structure in structures.values())
    ]
    if not kinds:
        return []
    if len(structures) == 1:
        (structure,) = structures.values()
        maps = []
        for title, of in (("groups", GROUP_KINDS), ("residual dimensions", RESIDUAL_KINDS)):
            if cut_kinds := [kind for kind in kinds if kind in of]:
                by_kind = [_column(structure, kind) for kind in cut_kinds]
                names = [WORDS[kind] for kind in cut_kinds]
                maps.append(HeatMap(f"Kept {title}", names, _rows(by_kind)))
        return maps
    maps = []
    for kind in kinds:
        by_client = [_column(structure, kind) for structure in structures.values()]
        maps.append(HeatMap(f"Kept {WORDS[kind]}", list(structures), _rows(by_client)))
    return maps


def _is_cut(structure: Structure, kind: str) -> bool:
    return any(value < 1 for value in _column(structure, kind).values())


def _column(structure: Structure, kind: str) -> dict[int, float]:
    """Return the kept fraction of a kind by block of the base; 0 for a removed block."""
    kept = {block.source: len(block.kept(kind)) for block in structure.blocks}
    sizes = [getattr(one, kind) for one in structure.base]
    return {block: kept.get(block, 0) / size for block, size in enumerate(sizes) if size}


def _rows(columns: Sequence[Mapping[int, float]]) -> dict[int, list[float | None]]:
    """Return the values by block, in the order of the columns."""
    blocks = sorted(set().union(*columns))
    return {block: [column.get(block) for column in columns] for block in blocks}


def _add_counts(run: FinishedRun, layers: Layers) -> None:
    """Add what is kept of a model without ``structure.json``, compared with its base.

    The result then has the form ``plain`` or ``zero-filled``.
    """
    units = run.summary["report"]["groups_of_blocks"]
    name = str(run.setting("model"))
    try:
        plan = open_model(name).plan
    except EspalierError as error:
        layers.notes.append(f"What was kept of each block is not shown: {error}")
        return
    sizes = [sizes_of(plan, block) for block in plan.blocks]
    if len(sizes) != len(units):
        layers.notes.append(f"The model has {len(units)} of {len(sizes)} blocks.")
        return
    rows = {
        index: [own[kind] / getattr(size, kind) for kind in GROUP_KINDS]
        for index, (own, size) in enumerate(zip(units, sizes, strict=True))
    }
    layers.maps.append(HeatMap("Kept groups", [WORDS[kind] for kind in GROUP_KINDS], rows))


# ----- adapters -----------------------------------------------------------------------------------


def _updates(adapter: Path) -> HeatMap:
    """Return the Frobenius norm of each update ``B A``, without forming it.

    ``|B A|^2`` is the trace of ``(B^T B) (A A^T)``, which has the size of the rank.
    """
    values: dict[tuple[int, str], float] = {}
    with _tensors(adapter / "adapter_model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        for name in sorted(names):
            partner = name.replace(".lora_A.", ".lora_B.")
            if partner == name or partner not in names:
                continue
            a = tensors.get_tensor(name).double().numpy()
            b = tensors.get_tensor(partner).double().numpy()
            square = float(np.sum((b.T @ b) * (a @ a.T)))
            # Rounding may make the square of a tiny update negative.
            values[_place(name.replace(".lora_A", ""))] = max(0.0, square) ** 0.5
    return _table("Norm of the adapter's update of each matrix", values, percent=False)
