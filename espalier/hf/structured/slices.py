"""Which rows and columns of a base model's tensors a structure keeps, and under which names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from espalier.hf.families import Family
from espalier.models.plan import ModelPlan
from espalier.models.structure import COLUMNS, ROWS, BlockStructure, Structure, unit_size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """What is kept of a tensor; None stands for all."""

    source: str
    """Its name in the base model's files."""
    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None
    scales: "Tensor | None" = None
    """(kept columns,), float32: what each is multiplied by, and then rounded to the tensor's dtype."""

    @property
    def is_whole(self) -> bool:
        """Whether it is the tensor as it is."""
        return self.rows is None and self.columns is None and self.scales is None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what is kept of a tensor of this shape."""
        kept = (self.rows, self.columns)[: len(whole)]
        return (
            *(side if own is None else len(own) for side, own in zip(whole, kept, strict=False)),
            *whole[2:],
        )


def slices(
    family: Family, plan: ModelPlan, structure: Structure, stored: Sequence[str]
) -> dict[str, Slice]:
    """Every tensor of the smaller model by its name, which numbers the blocks anew, and what it is of the base's.

    Parameters
    ----------
    plan : of the base
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
    """What stands before a block's number in a tensor's name, the number, and the path within the block; None of others."""
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
    """Rows or columns that the kept units stand for; None where all units are kept."""
    kind = kinds[linear]
    kept = block.kept(kind)
    size = unit_size(plan, linear, kind)
    if len(kept) == getattr(structure.base[block.source], kind):
        return None
    return kept if size == 1 else [unit * size + at for unit in kept for at in range(size)]
