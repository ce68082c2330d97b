"""Structure of a smaller model: the parts of a base model that it keeps.

A structure is a value with a JSON form and a hash. A block consists of prunable groups of two
kinds: its attention groups, that is, key-value groups (rows of query, key and value, columns of the
attention output; one head in multi-head attention), and its FFN channels (rows of gate and up, a
column of down). It also has residual dimensions, which attention and FFN read and write (SFT-P,
section 3.1). A structure lists kept blocks, groups and dimensions by their number in the base.
Plans, contracts and byte counts of a smaller model follow from the base's plan and a structure.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.errors import EspalierError, InputError
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan

VERSION = 1
"""Version of the JSON form."""

Numbers = tuple[int, ...]
"""Ascending numbers of groups or residual dimensions."""


@dataclass(frozen=True)
class Sizes:
    """Number of groups and residual dimensions of each kind in a block."""

    groups: int
    """Number of attention groups (key-value groups)."""
    channels: int
    """Number of FFN channels."""
    attn_reads: int
    """Number of residual dimensions that query, key and value read."""
    attn_writes: int
    """Number of residual dimensions to which the attention output is added."""
    mlp_reads: int
    """Number of residual dimensions that gate and up read."""
    mlp_writes: int
    """Number of residual dimensions to which the output of down is added."""


KINDS = tuple(field.name for field in fields(Sizes))
"""Kinds of prunable groups and of residual dimensions."""
GROUP_KINDS = KINDS[:2]
"""Kinds of prunable groups: attention groups and FFN channels."""
RESIDUAL_KINDS = KINDS[2:]
"""Kinds of residual dimensions."""

ROWS = {
    "attn.q": "groups", "attn.k": "groups", "attn.v": "groups", "attn.qkv": "groups",
    "attn.o": "attn_writes",
    "mlp.gate": "channels", "mlp.up": "channels", "mlp.gateup": "channels",
    "mlp.down": "mlp_writes",
}  # fmt: skip
"""Kind to which the rows and bias values of a matrix belong."""
COLUMNS = {
    "attn.q": "attn_reads", "attn.k": "attn_reads", "attn.v": "attn_reads",
    "attn.qkv": "attn_reads", "attn.o": "groups",
    "mlp.gate": "mlp_reads", "mlp.up": "mlp_reads", "mlp.gateup": "mlp_reads",
    "mlp.down": "channels",
}  # fmt: skip
"""Kind to which the columns of a matrix belong."""
FUSED = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.gateup": ("mlp.gate", "mlp.up")}
"""Matrices of some families that consist of the rows of several others, one after another."""
READERS = {kind: linear for linear, kind in COLUMNS.items() if kind in GROUP_KINDS}
"""Matrix that reads the output of each kind of group; each of its columns belongs to one group."""
ADDED_BIASES = ("attn.o", "mlp.down")
"""Matrices that may get a bias that the base lacks.

It adds the mean output of the cut groups (FLAP, section 3.3).
"""


@dataclass(frozen=True)
class BlockStructure:
    """Kept block: its number in the base, and the kept numbers of each kind, ascending."""

    source: int
    """Number of the block in the base."""
    groups: Numbers
    channels: Numbers
    attn_reads: Numbers
    attn_writes: Numbers
    mlp_reads: Numbers
    mlp_writes: Numbers

    def kept(self, kind: str) -> Numbers:
        """Return the kept numbers of a kind."""
        numbers: Numbers = getattr(self, kind)
        return numbers

    @property
    def sizes(self) -> Sizes:
        """Number of kept groups and residual dimensions of each kind."""
        return Sizes(**{kind: len(self.kept(kind)) for kind in KINDS})


@dataclass(frozen=True)
class Structure:
    """Parts of a base model that a smaller model keeps; valid by construction.

    Raises
    ------
    InputError
        If no block is kept, a block or number does not exist or is out of order, a block keeps
        nothing of a kind, or ``added_biases`` names another matrix.
    """

    base: tuple[Sizes, ...]
    """Sizes of each block of the base."""
    blocks: tuple[BlockStructure, ...]
    """Kept blocks, in order."""
    added_biases: tuple[str, ...] = ()
    """Canonical names, among ``ADDED_BIASES``, of matrices that have a bias in all blocks.

    They have one even if those of the base have none.
    """
    norm_of_read: bool = False
    """True if a norm sees only the residual dimensions that are read after it, not all of them."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise InputError("structure: no block stays; keep one at least")
        _require_ascending("blocks", [block.source for block in self.blocks], len(self.base))
        for block in self.blocks:
            for kind in KINDS:
                where = f"{kind} of block {block.source}"
                _require_ascending(where, block.kept(kind), getattr(self.base[block.source], kind))
        if unknown := sorted(set(self.added_biases) - set(ADDED_BIASES)):
            raise InputError(
                f"structure: added_biases names {', '.join(unknown)}; there may be"
                f" {' and '.join(ADDED_BIASES)}"
            )

    # ----- construction -----

    @staticmethod
    def whole(plan: ModelPlan) -> "Structure":
        """Return the structure that keeps the whole model."""
        base = tuple(sizes_of(plan, block) for block in plan.blocks)
        blocks = (
            BlockStructure(index, **{kind: tuple(range(getattr(sizes, kind))) for kind in KINDS})
            for index, sizes in enumerate(base)
        )
        return Structure(base, tuple(blocks))

    def with_blocks(self, sources: Sequence[int]) -> "Structure":
        """Return the structure that keeps only these blocks.

        Parameters
        ----------
        sources : numbers of the blocks in the base, ascending. All must be kept by this structure.

        Raises
        ------
        InputError
            If this structure does not keep one of the blocks.
        """
        blocks_by_source = {block.source: block for block in self.blocks}
        if missing := [source for source in sources if source not in blocks_by_source]:
            raise InputError(f"structure: block {missing[0]} is not among those that stay")
        return replace(self, blocks=tuple(blocks_by_source[source] for source in sources))

    def keeping(self, kept: Mapping[int, Mapping[str, Sequence[int]]]) -> "Structure":
        """Return the structure with other kept numbers in some blocks.

        Parameters
        ----------
        kept : kept numbers by number of the block in the base and kind. Other blocks and kinds stay
            the same.
        """

        def numbers(block: BlockStructure, kind: str) -> Numbers:
            return tuple(map(int, kept.get(block.source, {}).get(kind, block.kept(kind))))

        blocks = (
            BlockStructure(block.source, **{kind: numbers(block, kind) for kind in KINDS})
            for block in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def of(self, inner: "Structure") -> "Structure":
        """Compose with ``inner``: apply ``inner`` first, then this structure.

        The base of this structure must be the model that ``inner`` makes. The base of the result is
        the base of ``inner``.

        Raises
        ------
        InputError
            If the base of this structure is another model, or if both cut residual dimensions with
            different ``norm_of_read``.
        """
        if self.base != tuple(block.sizes for block in inner.blocks):
            raise InputError("structure: it does not fit the model that it is applied to")
        blocks = []
        for block in self.blocks:
            inner_block = inner.blocks[block.source]
            kept = {
                # Numbers of this structure count what ``inner`` keeps, so they are translated to
                # the base's.
                kind: tuple(inner_block.kept(kind)[number] for number in block.kept(kind))
                for kind in KINDS
            }
            blocks.append(BlockStructure(inner_block.source, **kept))
        added = tuple(
            name for name in ADDED_BIASES if name in {*self.added_biases, *inner.added_biases}
        )
        # Without a cut of residual dimensions both kinds of norm compute the same.
        if self.norm_of_read != inner.norm_of_read and self.cuts_residual and inner.cuts_residual:
            raise InputError(
                "structure: the two models that are put together have other norms (norm_of_read);"
                " prune them alike"
            )
        return Structure(inner.base, tuple(blocks), added, self.norm_of_read or inner.norm_of_read)

    # ----- properties -----

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut and nothing is added."""
        return (
            self.keeps_whole_blocks and len(self.blocks) == len(self.base) and not self.added_biases
        )

    @property
    def keeps_whole_blocks(self) -> bool:
        """True if the kept blocks are complete."""
        return all(block.sizes == self.base[block.source] for block in self.blocks)

    @property
    def cuts_residual(self) -> bool:
        """True if a block reads or writes fewer residual dimensions than in the base."""
        return any(
            len(block.kept(kind)) < getattr(self.base[block.source], kind)
            for block in self.blocks
            for kind in RESIDUAL_KINDS
        )

    # ----- JSON -----

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, in which numbers are written as ranges: ``"0-3,7"``."""
        return {
            "version": VERSION,
            "base": [{kind: getattr(sizes, kind) for kind in KINDS} for sizes in self.base],
            "blocks": [
                {"source": block.source, **{kind: as_ranges(block.kept(kind)) for kind in KINDS}}
                for block in self.blocks
            ],
            "added_biases": list(self.added_biases),
            **({"norm_of_read": True} if self.norm_of_read else {}),
        }

    @staticmethod
    def from_json(document: Any, where: str) -> "Structure":
        """Read the JSON form of ``to_json``.

        Parameters
        ----------
        where : origin of the document, for errors

        Raises
        ------
        InputError
            If the document has another form or version, or is not a valid structure.
        """
        try:
            if document["version"] != VERSION:
                raise InputError(f"version = {document['version']!r}, this release reads {VERSION}")
            base = tuple(
                Sizes(**{kind: _count(sizes[kind]) for kind in KINDS}) for sizes in document["base"]
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
        except EspalierError as error:
            raise InputError(f"{where}: {str(error).removeprefix('structure: ')}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{where}: is not the structure of a model; export the model again"
            ) from None

    @property
    def sha256(self) -> str:
        """Hash of the JSON form."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def sizes_of(plan: ModelPlan, block: BlockPlan) -> Sizes:
    """Return the number of groups and residual dimensions of each kind in a block."""
    shapes = {linear.name: linear.shape for linear in block.linears}
    # A fused matrix gives the same numbers: a group has rows in each of its parts.
    keys = "attn.k" if "attn.k" in shapes else "attn.qkv"
    up = "mlp.up" if "mlp.up" in shapes else "mlp.gateup"
    return Sizes(
        shapes[keys][0] // group_size(plan, keys, "groups"),
        shapes[up][0] // group_size(plan, up, "channels"),
        shapes[keys][1],
        shapes["attn.o"][0],
        shapes[up][1],
        shapes["mlp.down"][0],
    )


def group_size(plan: ModelPlan, linear: str, kind: str) -> int:
    """Return the number of rows or columns of a matrix that belong to one group or dimension."""
    if linear in FUSED and kind in GROUP_KINDS:
        return sum(group_size(plan, part, kind) for part in FUSED[linear])
    if kind != "groups":
        return 1
    # An attention group has one key-value head and ``heads_per_group`` query heads.
    return plan.head_dim * (plan.heads_per_group if linear in ("attn.q", "attn.o") else 1)


def structured_plan(plan: ModelPlan, structure: Structure) -> ModelPlan:
    """Return the plan of the smaller model, with consecutive block numbers.

    Raises
    ------
    InputError
        If the structure belongs to another model.
    """
    if structure.base != (sizes := tuple(sizes_of(plan, block) for block in plan.blocks)):
        difference = (
            f"{len(structure.base)} blocks"
            if len(structure.base) != len(sizes)
            else "blocks of other sizes"
        )
        raise InputError(
            f"structure: it is of a model with {difference}, not of this one; name the base that it"
            " was made of"
        )
    blocks = []
    for index, block in enumerate(structure.blocks):
        dense_block = plan.blocks[block.source]
        linears = [
            _cut_linear(plan, linear_plan, index, block, structure)
            for linear_plan in dense_block.linears
        ]
        blocks.append(BlockPlan(index, tuple(linears), dense_block.others))
    # Embeddings, final norm and head stay as they are.
    num_outside = plan.num_parameters - sum(block.num_parameters for block in plan.blocks)
    num_parameters = num_outside + sum(block.num_parameters for block in blocks)
    return replace(plan, blocks=tuple(blocks), num_parameters=num_parameters)


def _cut_linear(
    plan: ModelPlan, linear: LinearPlan, index: int, block: BlockStructure, structure: Structure
) -> LinearPlan:
    rows, columns = (
        len(block.kept(kinds[linear.name])) * group_size(plan, linear.name, kinds[linear.name])
        for kinds in (ROWS, COLUMNS)
    )
    # The blocks of the smaller model are numbered without gaps.
    parameter = linear.parameter.replace(f".{block.source}.", f".{index}.", 1)
    bias = linear.bias or linear.name in structure.added_biases
    return replace(linear, shape=(rows, columns), parameter=parameter, bias=bias)


def kind_of(linear: str) -> tuple[str, int]:
    """Return the kind of a matrix's prunable groups, and their axis: 0 for rows, 1 for columns."""
    return (ROWS[linear], 0) if ROWS[linear] in GROUP_KINDS else (COLUMNS[linear], 1)


def kept_indices(
    plan: ModelPlan,
    structure: Structure,
    block: BlockStructure,
    linear: str,
    kinds: Mapping[str, str],
) -> Sequence[int] | None:
    """Return the rows or columns of a matrix of the base that a block keeps; None for all of them.

    Parameters
    ----------
    kinds : ``ROWS`` or ``COLUMNS``
    """
    kind = kinds[linear]
    kept = block.kept(kind)
    total = getattr(structure.base[block.source], kind)
    if len(kept) == total:
        return None
    lines = lines_of_groups(plan, linear, kind, total)
    # Sorted, because in a fused matrix the lines of a group are not adjacent.
    return kept if lines.shape[1] == 1 else np.sort(lines[list(kept)].ravel()).tolist()


def lines_of_groups(plan: ModelPlan, linear: str, kind: str, total: int) -> NDArray[np.int64]:
    """Return the rows or columns of each group or dimension of a matrix: (total, lines per group).

    They are contiguous, in a fused matrix within each of its parts.
    """
    parts = []
    start = 0
    # Only rows are fused, and those belong to groups.
    for part in FUSED.get(linear, (linear,)) if kind in GROUP_KINDS else (linear,):
        size = group_size(plan, part, kind)
        parts.append(start + np.arange(total * size).reshape(total, size))
        start += total * size
    return np.concatenate(parts, axis=1)


def group_costs(plan: ModelPlan, block: BlockPlan) -> tuple[int, int]:
    """Return the number of parameters of one attention group and of one FFN channel of a block.

    Bias values of the removed rows are included.
    """
    costs = dict.fromkeys(GROUP_KINDS, 0)
    for linear in block.linears:
        rows = ROWS[linear.name]
        columns = COLUMNS[linear.name]
        if rows in costs:
            costs[rows] += group_size(plan, linear.name, rows) * (linear.shape[1] + linear.bias)
        if columns in costs:
            costs[columns] += group_size(plan, linear.name, columns) * linear.shape[0]
    groups, channels = costs.values()
    return groups, channels


def as_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, for instance ``0-3,7``."""
    parts = []
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            first = numbers[start]
            last = numbers[stop - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = stop
    return ",".join(parts)


MAX_NUMBERS = 1 << 24
"""Maximum number of numbers in a text; no model has as many groups of a kind in a block."""


def from_ranges(text: str) -> Numbers:
    """Read numbers from the text of ``as_ranges``.

    Raises
    ------
    ValueError
        If the text has another form.
    """
    numbers: list[int] = []
    for part in text.split(","):
        # Reading a number takes time that grows with its digits, so limit them.
        match = re.fullmatch(r"([0-9]{1,8})(?:-([0-9]{1,8}))?", part)
        if match is None:
            raise ValueError(text)
        start = int(match[1])
        stop = int(match[2] or match[1]) + 1
        if len(numbers) + stop - start > MAX_NUMBERS:
            raise ValueError(text)
        numbers += range(start, stop)
    return tuple(numbers)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _require_ascending(what: str, numbers: Sequence[int], available: int) -> None:
    if not numbers:
        raise InputError(f"structure: {what}: none is kept; keep one at least")
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise InputError(f"structure: {what}: numbers are not ascending, or one is there twice")
    if numbers[0] < 0 or numbers[-1] >= available:
        raise InputError(
            f"structure: {what}: {max(numbers[-1], -numbers[0])} does not exist, there are"
            f" {available}"
        )
