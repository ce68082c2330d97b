"""Which units of a base model a smaller model keeps: a value over the model's plan, in JSON and with a hash.

Units of a block are its key-value groups (rows of query, key and value, columns of the attention's output; one head in
multi-head attention), its feed-forward channels (rows of gate and up, a column of down), and the lanes of the residual stream
that attention and feed-forward part read and write (SFT-P, section 3.1). A structure names what is kept by its number in the
base, and the blocks that stay by where they came from. Every plan, contract and byte count of a smaller model is a function of
the base's plan and a structure.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from espalier.settings.mistakes import Mistake
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

VERSION = 1
"""Of the JSON form."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """How many units of each kind a block has."""

    groups: int
    """Key-value groups."""
    channels: int
    """Feed-forward channels."""
    attn_reads: int
    """Lanes of the residual stream that query, key and value read."""
    attn_writes: int
    """Lanes that the attention's output is added to."""
    mlp_reads: int
    """Lanes that gate and up read."""
    mlp_writes: int
    """Lanes that down is added to."""


KINDS = tuple(field.name for field in fields(Units))
LANES = ("attn_reads", "attn_writes", "mlp_reads", "mlp_writes")

ROWS = {
    "attn.q": "groups", "attn.k": "groups", "attn.v": "groups", "attn.o": "attn_writes",
    "mlp.gate": "channels", "mlp.up": "channels", "mlp.down": "mlp_writes",
}  # fmt: skip
"""Kind of unit that the rows of a matrix, and the numbers of its bias, belong to."""
COLUMNS = {
    "attn.q": "attn_reads", "attn.k": "attn_reads", "attn.v": "attn_reads", "attn.o": "groups",
    "mlp.gate": "mlp_reads", "mlp.up": "mlp_reads", "mlp.down": "channels",
}  # fmt: skip
"""Kind of unit that the columns of a matrix belong to."""
ADDED_BIASES = ("attn.o", "mlp.down")
"""Matrices that may get a bias which the base does not have: it stands for the mean of what was cut (FLAP, section 3.3)."""


@dataclass(frozen=True)
class BlockStructure:
    """A block that stays: where it came from, and the numbers of the units that it keeps, ascending."""

    source: int
    groups: Numbers
    channels: Numbers
    attn_reads: Numbers
    attn_writes: Numbers
    mlp_reads: Numbers
    mlp_writes: Numbers

    def kept(self, kind: str) -> Numbers:
        """Numbers of the units of a kind."""
        found: Numbers = getattr(self, kind)
        return found

    @property
    def units(self) -> Units:
        """How many of each kind it keeps."""
        return Units(**{kind: len(self.kept(kind)) for kind in KINDS})


@dataclass(frozen=True)
class Structure:
    """What a smaller model keeps of a base; valid by construction.

    Raises
    ------
    Mistake
        No block stays, a block or unit does not exist or is named out of order, or a block keeps no unit of a kind.
    """

    base: tuple[Units, ...]
    """Units of each block of the base."""
    blocks: tuple[BlockStructure, ...]
    """The blocks that stay, in order."""
    added_biases: tuple[str, ...] = ()
    """Canonical names among ``ADDED_BIASES``: these matrices have a bias in all blocks, also where the base's have none."""
    norm_of_read: bool = False
    """Whether a norm sees the lanes that are read behind it alone, and not all of the residual stream."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise Mistake("structure: no block stays; keep one at least")
        _require_ascending("blocks", [block.source for block in self.blocks], len(self.base))
        for block in self.blocks:
            for kind in KINDS:
                where = f"{kind} of block {block.source}"
                _require_ascending(where, block.kept(kind), getattr(self.base[block.source], kind))
        if unknown := sorted(set(self.added_biases) - set(ADDED_BIASES)):
            raise Mistake(
                f"structure: added_biases names {', '.join(unknown)}; there may be"
                f" {' and '.join(ADDED_BIASES)}"
            )

    # ----- making -----------------------------------------------------------------------------------------------------

    @staticmethod
    def whole(plan: ModelPlan) -> "Structure":
        """The structure that keeps all of a model."""
        base = tuple(units_of(plan, block) for block in plan.blocks)
        return Structure(
            base, tuple(_whole_block(index, units) for index, units in enumerate(base))
        )

    def with_blocks(self, sources: Sequence[int]) -> "Structure":
        """The same, of these blocks of the base alone; all must be among those that stay."""
        known = {block.source: block for block in self.blocks}
        if missing := [source for source in sources if source not in known]:
            raise Mistake(f"structure: block {missing[0]} is not among those that stay")
        return replace(self, blocks=tuple(known[source] for source in sources))

    def keeping(self, kept: Mapping[int, Mapping[str, Sequence[int]]]) -> "Structure":
        """The same with other units in some blocks: by the block's number in the base, and kind of unit."""

        def numbers(block: BlockStructure, kind: str) -> Numbers:
            return tuple(map(int, kept.get(block.source, {}).get(kind, block.kept(kind))))

        blocks = (
            BlockStructure(block.source, **{kind: numbers(block, kind) for kind in KINDS})
            for block in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def of(self, inner: "Structure") -> "Structure":
        """This structure, whose base is the model that ``inner`` makes, as one structure of the base of ``inner``.

        Raises
        ------
        Mistake
            Its base is another model.
        """
        if self.base != tuple(block.units for block in inner.blocks):
            raise Mistake(
                "structure: it is of another model than the one that it is to be put upon"
            )
        blocks = []
        for block in self.blocks:
            below = inner.blocks[block.source]
            kept = {
                kind: tuple(below.kept(kind)[number] for number in block.kept(kind))
                for kind in KINDS
            }
            blocks.append(BlockStructure(below.source, **kept))
        added = tuple(
            name for name in ADDED_BIASES if name in {*self.added_biases, *inner.added_biases}
        )
        if self.norm_of_read != inner.norm_of_read and self.cuts_lanes and inner.cuts_lanes:
            raise Mistake(
                "structure: the two models that are put together have other norms (norm_of_read);"
                " prune them alike"
            )
        return Structure(inner.base, tuple(blocks), added, self.norm_of_read or inner.norm_of_read)

    # ----- what it keeps ----------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether it keeps all and adds nothing."""
        return self.cuts_no_unit and len(self.blocks) == len(self.base) and not self.added_biases

    @property
    def cuts_no_unit(self) -> bool:
        """Whether the blocks that stay are whole."""
        return all(block.units == self.base[block.source] for block in self.blocks)

    @property
    def cuts_lanes(self) -> bool:
        """Whether a block does not read or write all lanes that the base's does."""
        return any(
            len(block.kept(kind)) < getattr(self.base[block.source], kind)
            for block in self.blocks
            for kind in LANES
        )

    # ----- as text ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """JSON values: numbers as ranges, ``"0-3,7"``."""
        return {
            "version": VERSION,
            "base": [{kind: getattr(units, kind) for kind in KINDS} for units in self.base],
            "blocks": [
                {"source": block.source, **{kind: as_ranges(block.kept(kind)) for kind in KINDS}}
                for block in self.blocks
            ],
            "added_biases": list(self.added_biases),
            **({"norm_of_read": True} if self.norm_of_read else {}),
        }

    @staticmethod
    def from_json(document: Any, where: str) -> "Structure":
        """Read what ``to_json`` returned.

        Raises
        ------
        Mistake
            It is something else, or no valid structure; it names ``where`` the text came from.
        """
        try:
            if document["version"] != VERSION:
                raise Mistake(f"version = {document['version']!r}, this release reads {VERSION}")
            base = tuple(
                Units(**{kind: _count(units[kind]) for kind in KINDS}) for units in document["base"]
            )
            blocks = tuple(
                BlockStructure(
                    _count(block["source"]), **{kind: from_ranges(block[kind]) for kind in KINDS}
                )
                for block in document["blocks"]
            )
            return Structure(
                base,
                blocks,
                tuple(document["added_biases"]),
                bool(document.get("norm_of_read", False)),
            )
        except Mistake as mistake:
            raise Mistake(f"{where}: {str(mistake).removeprefix('structure: ')}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Mistake(f"{where}: is not the structure of a model; write it anew") from None

    @property
    def sha256(self) -> str:
        """Hash of the JSON form."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def _whole_block(index: int, units: Units) -> BlockStructure:
    return BlockStructure(index, **{kind: tuple(range(getattr(units, kind))) for kind in KINDS})


def units_of(plan: ModelPlan, block: BlockPlan) -> Units:
    """How many units of each kind a block of a model has."""
    shapes = {linear.name: linear.shape for linear in block.linears}
    return Units(
        shapes["attn.k"][0] // plan.head_dim,
        shapes["mlp.up"][0],
        shapes["attn.q"][1],
        shapes["attn.o"][0],
        shapes["mlp.up"][1],
        shapes["mlp.down"][0],
    )


def unit_size(plan: ModelPlan, linear: str, kind: str) -> int:
    """Rows or columns of a matrix that one unit of a kind stands for."""
    if kind != "groups":
        return 1
    return plan.head_dim * (plan.heads_per_group if linear in ("attn.q", "attn.o") else 1)


def structured_plan(plan: ModelPlan, structure: Structure) -> ModelPlan:
    """The plan of the smaller model: its blocks are numbered anew, and its parameters are those of the built model.

    Raises
    ------
    Mistake
        The structure is of another model.
    """
    if structure.base != (found := tuple(units_of(plan, block) for block in plan.blocks)):
        many = (
            f"{len(structure.base)} blocks"
            if len(structure.base) != len(found)
            else "blocks of other units"
        )
        raise Mistake(
            f"structure: it is of a model with {many}, not of this one; name the base that it was"
            " made of"
        )
    blocks = tuple(
        _cut_block(plan, index, block, structure) for index, block in enumerate(structure.blocks)
    )
    beside = plan.num_parameters - sum(block.num_parameters for block in plan.blocks)
    return replace(
        plan, blocks=blocks, num_parameters=beside + sum(block.num_parameters for block in blocks)
    )


def _cut_block(
    plan: ModelPlan, index: int, block: BlockStructure, structure: Structure
) -> BlockPlan:
    whole = plan.blocks[block.source]
    linears = tuple(_cut_linear(plan, linear, index, block, structure) for linear in whole.linears)
    return BlockPlan(index, linears, whole.others)


def _cut_linear(
    plan: ModelPlan, linear: LinearPlan, index: int, block: BlockStructure, structure: Structure
) -> LinearPlan:
    rows, columns = (
        len(block.kept(of[linear.name])) * unit_size(plan, linear.name, of[linear.name])
        for of in (ROWS, COLUMNS)
    )
    parameter = linear.parameter.replace(f".{block.source}.", f".{index}.", 1)
    bias = linear.bias or linear.name in structure.added_biases
    return replace(linear, shape=(rows, columns), parameter=parameter, bias=bias)


def unit_costs(plan: ModelPlan, block: BlockPlan) -> tuple[int, int]:
    """Parameters that one key-value group and one channel of a block stand for, with the biases of their rows."""
    costs = {"groups": 0, "channels": 0}
    for linear in block.linears:
        rows = ROWS[linear.name]
        columns = COLUMNS[linear.name]
        if rows in costs:
            costs[rows] += unit_size(plan, linear.name, rows) * (linear.shape[1] + linear.bias)
        if columns in costs:
            costs[columns] += unit_size(plan, linear.name, columns) * linear.shape[0]
    return costs["groups"], costs["channels"]


def as_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: ``0-3,7``."""
    parts = []
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            first = numbers[start]
            last = numbers[at - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = at
    return ",".join(parts)


MOST_NUMBERS = 1 << 24
"""No model has as many units of a kind in a block; a longer range is no structure."""


def from_ranges(text: str) -> Numbers:
    """Numbers from text; ``ValueError`` where it is none."""
    return tuple(_from_ranges(text))


def _from_ranges(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if (
            not part.isascii()
            or not first.isdecimal()
            or (dash and not last.isdecimal())
            or max(len(first), len(last)) > 8
        ):
            raise ValueError(text)
        start = int(first)
        stop = int(last or first) + 1
        if stop - start > MOST_NUMBERS:
            raise ValueError(text)
        yield from range(start, stop)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _require_ascending(what: str, numbers: Sequence[int], available: int) -> None:
    if not numbers:
        raise Mistake(f"structure: {what}: none is kept; keep one at least")
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise Mistake(f"structure: {what}: numbers are not ascending, or one is there twice")
    if numbers[0] < 0 or numbers[-1] >= available:
        raise Mistake(
            f"structure: {what}: {max(numbers[-1], -numbers[0])} does not exist, there are"
            f" {available}"
        )
