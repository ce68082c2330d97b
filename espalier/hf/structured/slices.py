"""Rows and columns of a base model's tensors that a structure keeps, and their new names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from espalier.hf.families import Family
from espalier.models.plan import ModelPlan
from espalier.models.structure import COLUMNS, ROWS, BlockStructure, Structure, group_size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Kept part of a tensor; None stands for all rows or columns."""

    source: str
    """Name of the tensor in the base model's files."""
    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None
    scales: "Tensor | None" = None
    """Factors of the kept columns, (kept columns,), float32.

    The product is rounded to the dtype of the tensor.
    """

    @property
    def is_whole(self) -> bool:
        """True if the slice is the unchanged tensor."""
        return self.rows is None and self.columns is None and self.scales is None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the slice of a tensor of shape ``whole``."""
        kept = (self.rows, self.columns)[: len(whole)]
        return (
            *(side if own is None else len(own) for side, own in zip(whole, kept, strict=False)),
            *whole[2:],
        )


def slices(
    family: Family, plan: ModelPlan, structure: Structure, stored: Sequence[str]
) -> dict[str, Slice]:
    """Return the slice of each tensor of the pruned model, by its name there.

    Blocks are renumbered.

    Parameters
    ----------
    family : model family
    plan : plan of the base
    structure : structure to keep of the base
    stored : names of the tensors in the base's files
    """
    places = {block.source: (index, block) for index, block in enumerate(structure.blocks)}
    found: dict[str, Slice] = {}
    for name in stored:
        block = block_of(family, name)
        if block is None:
            found[name] = Slice(name)
        elif block[1] in places:
            prefix, source, path = block
            index, kept = places[source]
            found[f"{prefix}{index}.{path}"] = _slice(family, plan, structure, kept, name, path)
    return found


def block_of(family: Family, name: str) -> tuple[str, int, str] | None:
    """Split the name of a block's tensor; None for other tensors.

    Returns
    -------
    tuple
        Prefix before the index of the block, the index, and the path within the block
    """
    for prefix in family.file_names(f"{family.blocks}."):
        number, dot, path = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and dot and number.isdecimal():
            return prefix, int(number), path
    return None


def _slice(
    family: Family,
    plan: ModelPlan,
    structure: Structure,
    block: BlockStructure,
    name: str,
    path: str,
) -> Slice:
    linear = {
        f"{own}.{kind}": known
        for known, own in family.linears.items()
        for kind in ("weight", "bias")
    }.get(path)
    if linear is None:
        return Slice(name)
    rows = kept_indices(plan, structure, block, linear, ROWS)
    return Slice(
        name,
        rows,
        kept_indices(plan, structure, block, linear, COLUMNS) if path.endswith(".weight") else None,
    )


def kept_indices(
    plan: ModelPlan,
    structure: Structure,
    block: BlockStructure,
    linear: str,
    kinds: Mapping[str, str],
) -> Sequence[int] | None:
    """Return the rows or columns of the kept groups; None if all groups are kept.

    Parameters
    ----------
    plan : plan of the base
    structure : structure to keep
    block : block of the structure
    linear : canonical name of the matrix
    kinds : ``ROWS`` or ``COLUMNS``
    """
    kind = kinds[linear]
    kept = block.kept(kind)
    size = group_size(plan, linear, kind)
    if len(kept) == getattr(structure.base[block.source], kind):
        return None
    # The rows or columns of a group are contiguous.
    return kept if size == 1 else [unit * size + at for unit in kept for at in range(size)]
