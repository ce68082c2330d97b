"""Names and shapes of the adapters that a run trains, and of the tensors that it trains whole.

They are a function of the model plan and the ``[lora]`` settings.

The LoRA adapter of a matrix of shape (out, in) is ``A`` of shape (rank, in) and ``B`` of shape
(out, rank); the update is ``scaling * B A``. In messages their names are canonical, such as
``attn.q.lora_a`` and ``attn.q.lora_b``, for every model family, and each block has one blob.
Tensors that are trained whole have canonical names too: ``norm.mlp.weight`` or ``attn.q.bias`` in
the blob of their block, and ``norm.final.weight`` or ``head.out.bias`` in a blob that belongs to no
block.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from espalier.errors import InputError
from espalier.models.plan import LinearPlan, ModelPlan, block_key
from espalier.models.structure import FUSED
from espalier.settings.tables.lora import SCALINGS, LoraSettings

if TYPE_CHECKING:
    from torch import Tensor

HEAD_KEY = "head"
"""Key of the blob with an encoder's classification head, which is trained whole."""

Bases = Literal["", "weights", "seed"]
"""Kind of frozen factors, between which a square matrix is trained.

``weights`` are singular vectors of the base model's matrices, ``seed`` are random. Empty: A and B
are trained, and there is no matrix between them.
"""
FACTORS = ("lora_a", "lora_b")
"""Ends of the canonical names of an adapter's factors A and B."""

Tensors = Mapping[str, Mapping[str, "Tensor"]]
"""Trained tensors by blob key and canonical name."""
Shapes = dict[str, dict[str, tuple[int, ...]]]
"""Shapes of trained tensors by blob key and canonical name."""


def is_folded(name: str) -> bool:
    """Return whether a canonical name is that of a factor of a folded update."""
    return name.endswith((".folded_a", ".folded_b"))


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter of one matrix."""

    linear: LinearPlan
    """Matrix that the adapter updates."""
    rank: int
    scaling: float
    """Factor of the update, alpha / rank."""

    @property
    def name_a(self) -> str:
        """Canonical name of A, (rank, in)."""
        return f"{self.linear.name}.lora_a"

    @property
    def name_b(self) -> str:
        """Canonical name of B, (out, rank)."""
        return f"{self.linear.name}.lora_b"

    def named(self, b: "Tensor", a: "Tensor") -> dict[str, "Tensor"]:
        """Return the factors by canonical name."""
        return {self.name_a: a, self.name_b: b}

    @property
    def folded_a(self) -> str:
        """Canonical name of the right factor of a folded update, (folded rank, in)."""
        return f"{self.linear.name}.folded_a"

    @property
    def folded_b(self) -> str:
        """Canonical name of the left factor of a folded update, (out, folded rank)."""
        return f"{self.linear.name}.folded_b"

    def folded_rank(self, folded: int) -> int:
        """Return the rank of the folded update: at most the smaller side of the matrix."""
        return min(folded, *self.linear.shape)

    @property
    def name_r(self) -> str:
        """Canonical name of the matrix between B and A, (rank, rank)."""
        return f"{self.linear.name}.lora_r"

    def limited(self, rank: int) -> "Adapter":
        """Return this adapter with a rank of at most ``rank`` and the same scaling."""
        return replace(self, rank=min(self.rank, rank))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A and B by canonical name."""
        out_features, in_features = self.linear.shape
        return {self.name_a: (self.rank, in_features), self.name_b: (out_features, self.rank)}

    def folded_shapes(self, folded: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a folded update's factors by canonical name; none if it is 0."""
        out_features, in_features = self.linear.shape
        rank = self.folded_rank(folded)
        if rank == 0:
            return {}
        return {self.folded_a: (rank, in_features), self.folded_b: (out_features, rank)}


@dataclass(frozen=True)
class AdapterPlan:
    """All tensors that a run trains."""

    blocks: Mapping[int, tuple[Adapter, ...]]
    """Adapters by block number."""
    whole: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Shapes of tensors that are trained whole, by blob key and canonical name.

    Methods that average adapters accept only a classification head here. A method that trains other
    tensors averages and writes them itself.
    """

    keep_zeros: bool = False
    """True if zero weights of the base model stay zero, which masks the updates."""
    factors: tuple[str, ...] = FACTORS
    """Factors that are trained and sent; the model has the others too, frozen."""
    bases: Bases = ""
    """Kind of the frozen factors if only the matrix between them is trained and sent."""
    folded: int = 0
    """Rank of the updates that are folded into the base and sent with the adapters."""

    @property
    def head(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the classification head's tensors by canonical name; empty without a head."""
        return self.whole.get(HEAD_KEY, {})

    def __iter__(self) -> Iterator[tuple[int, Adapter]]:
        """Yield every adapter with its block number, in block order."""
        for index in sorted(self.blocks):
            for adapter in self.blocks[index]:
                yield index, adapter

    def shapes(self) -> Shapes:
        """Return the shapes of all trained tensors."""
        shapes: Shapes = {}
        for index, adapter in self:
            block = shapes.setdefault(block_key(index), {})
            block.update(self.trained_shapes(adapter))
            block.update(adapter.folded_shapes(self.folded))
        for key, tensors in self.whole.items():
            shapes.setdefault(key, {}).update(tensors)
        return shapes

    def trained_shapes(self, adapter: Adapter) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an adapter's trained tensors by canonical name."""
        if self.bases:
            return {adapter.name_r: (adapter.rank, adapter.rank)}
        return {name: shape for name, shape in adapter.shapes().items() if self.trains(name)}

    def trains(self, name: str) -> bool:
        """Return False for the canonical name of a factor that is frozen."""
        end = name.rpartition(".")[2]
        return end not in FACTORS or (end in self.factors and not self.bases)

    def with_factors(self, factors: tuple[str, ...], folded: int = 0) -> "AdapterPlan":
        """Return this plan with other trained factors, and folded updates of a rank."""
        return replace(self, factors=factors, folded=folded)

    def limited(self, rank: int) -> "AdapterPlan":
        """Return this plan with ranks of at most ``rank``; all else stays the same."""
        blocks = {
            index: tuple(a.limited(rank) for a in adapters)
            for index, adapters in self.blocks.items()
        }
        return replace(self, blocks=blocks)

    def joined(self, other: "AdapterPlan | None") -> "AdapterPlan":
        """Return this plan with the adapters of the blocks of ``other`` added."""
        return self if other is None else replace(self, blocks={**self.blocks, **other.blocks})

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        tensors = self.shapes().values()
        return sum(math.prod(shape) for block_shapes in tensors for shape in block_shapes.values())


def cut_to_rank(tensors: Mapping[str, "Tensor"], rank: int) -> dict[str, "Tensor"]:
    """Return copies of the tensors of a blob, reduced to a lower rank.

    The rows of A and the columns of B from ``rank`` on are set to zero; the shapes stay the same.
    """
    cut = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in cut.items():
        if name.endswith(".lora_a"):
            tensor[rank:] = 0
        elif name.endswith(".lora_b"):
            tensor[:, rank:] = 0
    return cut


def adapter_plan(plan: ModelPlan, lora: LoraSettings, num_classes: int = 0) -> AdapterPlan:
    """Return the adapters that the settings describe, and the classification head of an encoder.

    Raises InputError if the model has no such matrix or block, the rank exceeds the smaller side of
    a matrix, or alpha / rank is outside ``SCALINGS``.

    Parameters
    ----------
    num_classes : number of classes of the task; used only for an encoder
    """
    names = [linear.name for linear in plan.blocks[0].linears]
    targets = list(dict.fromkeys(_fused(name, names) for name in lora.target_names(names)))
    if unknown_targets := sorted(set(targets) - set(names)):
        raise InputError(
            f"lora.targets: the model has no {', '.join(unknown_targets)}; its blocks have"
            f" {', '.join(names)}: set lora.targets to some of them, or to 'all'"
        )
    layers = lora.layer_numbers(len(plan.blocks))
    if layers[-1] >= len(plan.blocks):
        raise InputError(
            f"lora.layers = {lora.layers!r}: the model has the blocks 0 to {len(plan.blocks) - 1}"
        )
    if not SCALINGS[0] <= lora.scaling <= SCALINGS[1]:
        raise InputError(
            f"lora.alpha: alpha / rank is {lora.scaling:g}; choose them so that it is"
            f" {SCALINGS[0]:g} to {SCALINGS[1]:g}"
        )
    blocks = {index: tuple(_adapters(plan, lora, index, targets)) for index in layers}
    if lora.keep_zeros and plan.head_features:
        raise InputError(
            "lora.keep-zeros = true: an encoder is not pruned here, so it has no zeros to keep; set"
            " it to false"
        )
    return replace(head_plan(plan, num_classes), blocks=blocks, keep_zeros=lora.keep_zeros)


def _fused(target: str, names: Collection[str]) -> str:
    """Return the matrix of a block that has the rows of a target; the target if there is none."""
    if target in names:
        return target
    wholes = (whole for whole, parts in FUSED.items() if target in parts and whole in names)
    return next(wholes, target)


def head_plan(plan: ModelPlan, num_classes: int) -> AdapterPlan:
    """Return a plan with only the classification head of an encoder; it is empty for a decoder.

    A head is a dense layer and an output layer.
    """
    features = plan.head_features
    head = {
        "head.dense.weight": (features, features),
        "head.dense.bias": (features,),
        "head.out.weight": (num_classes, features),
        "head.out.bias": (num_classes,),
    }
    return AdapterPlan({}, {HEAD_KEY: head} if features else {})


def _adapters(
    plan: ModelPlan, lora: LoraSettings, index: int, targets: list[str]
) -> Iterator[Adapter]:
    for linear in plan.blocks[index].linears:
        if linear.name in targets:
            if lora.rank > min(linear.shape):
                shape = f"{linear.shape[0]} x {linear.shape[1]}"
                trained = (one for one in plan.linears if one.name in targets)
                largest = min(min(one.shape) for one in trained)
                raise InputError(
                    f"lora.rank: {lora.rank} is larger than a side of {linear.name} in block"
                    f" {index} ({shape}); lower it to {largest} or less"
                )
            yield Adapter(linear, lora.rank, lora.scaling)
