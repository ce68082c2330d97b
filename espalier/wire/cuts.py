"""What is cut out of a model as a payload: for each block, one bit per unit, and biases that make up for it."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import Contract
from espalier.wire.messages import Letter, NoScalars
from espalier.wire.parts import Delivery, parts_of, require_result_wanted
from espalier.wire.payload import TensorSpec, block_key, pack_tensors, unpack_tensors, views
from espalier.wire.plan import ModelPlan, PlanOf
from espalier.wire.structure import Structure, units_of
from pruning_kernels.bitmask import has_clean_padding, num_words, pack, unpack

KINDS = ("groups", "channels")
"""Units that may be cut, in the order of ``unit_costs``."""


def cut_name(kind: str) -> str:
    """Tensor name of the bits of a block's units of a kind: 1 = cut."""
    return f"{kind}.cut"


def bias_name(linear: str) -> str:
    """Tensor name of the whole bias of a matrix."""
    return f"{linear}.bias"


def cut_specs(plan: ModelPlan, biases: Sequence[str]) -> dict[str, dict[str, TensorSpec]]:
    """The blobs that describe a smaller model, one per block; ``biases`` are matrices that get a bias, float32."""
    specs = {}
    for block in plan.blocks:
        units, rows = units_of(plan, block), {linear.name: linear.shape[0] for linear in block.linears}
        specs[block_key(block.index)] = {
            **{cut_name(kind): TensorSpec("U64", (num_words(getattr(units, kind)),)) for kind in KINDS},
            **{bias_name(name): TensorSpec("F32", (rows[name],)) for name in biases},
        }
    return specs


def pack_cut(cut: Mapping[str, NDArray[np.bool_]], biases: Mapping[str, NDArray[np.float32]]) -> bytes:
    """Serialise what is cut of a block, bool arrays by kind, and its biases by canonical name."""
    bits = {cut_name(kind): pack(units) for kind, units in cut.items()}
    return pack_tensors({**bits, **{bias_name(name): bias for name, bias in biases.items()}})


def structure_of(plan: ModelPlan, blob_of: Callable[[int], bytes], biases: Sequence[str]) -> Structure:
    """The structure that the blobs of all blocks describe."""
    whole, kept = Structure.whole(plan), dict[int, dict[str, list[int]]]()
    for index, units in enumerate(whole.base):
        words = unpack_tensors(blob_of(index))
        bits = {kind: unpack(words[cut_name(kind)], (1, getattr(units, kind)))[0] for kind in KINDS}
        kept[index] = {kind: np.flatnonzero(~cut).tolist() for kind, cut in bits.items()}
    made = whole.keeping(kept)
    return Structure(made.base, made.blocks, tuple(biases))


def biases_of(blob: bytes, biases: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """The biases of a block, by canonical name."""
    tensors = unpack_tensors(blob)
    return {name: tensors[bias_name(name)] for name in biases}


class SomeOfEachKindStays:
    """Checks that a block keeps a unit of each kind, and that its biases are numbers."""

    def __init__(self, plan: ModelPlan) -> None:
        self._units = {block_key(block.index): units_of(plan, block) for block in plan.blocks}

    def __call__(self, key: str, blob: bytes) -> None:
        """Raise Mistake otherwise."""
        tensors = views(blob)
        for kind in KINDS:
            words, number = tensors[cut_name(kind)], getattr(self._units[key], kind)
            if not has_clean_padding(words, number):
                raise Mistake(f"{key} {kind}: bits are set beyond the last unit")
            if unpack(words, (1, number)).all():
                raise Mistake(f"{key} {kind}: all are cut, one must stay")
        if not all(np.isfinite(tensor).all() for name, tensor in tensors.items() if name.endswith(".bias")):
            raise Mistake(f"{key}: a bias is no finite number")


def delivery_of_cuts(request: Letter, plan_of: PlanOf, run: RunSettings, biases: Sequence[str]) -> Contract:
    """The contract of a ``deliver``: a part of what is cut, on its way to a client that evaluates it.

    Raises
    ------
    Mistake
        Nothing is delivered in this run, or there is no such part.
    """
    require_result_wanted(run)
    plan = plan_of()
    specs = cut_specs(plan, biases)
    delivery = Delivery(
        order=NoScalars,
        specs=specs,
        parts=parts_of(specs, run.part_bytes),
        observer="that the federated result arrived, nothing else; it is sent with `evaluation.own-text`",
        check_values=SomeOfEachKindStays(plan),
    )
    return delivery.contract(request, run.method)
