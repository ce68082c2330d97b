"""What is cut out of a model as a payload: for each block, one bit per unit, and biases or scales that make up for it."""

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
from espalier.wire.structure import Structure, Units, units_of
from pruning_kernels.bitmask import has_clean_padding, num_words, pack, unpack

KINDS = ("groups", "channels")
"""Units that may be cut, in the order of ``unit_costs``."""
READERS = {"groups": "attn.o", "channels": "mlp.down"}
"""The matrix that reads what units of a kind give: its columns are theirs alone."""
MOST_SCALE = 10.0
"""Magnitude of a unit's scale (Kwon et al. 2022, section 4.3); beyond it a fit means nothing."""


def cut_name(kind: str) -> str:
    """Tensor name of the bits of a block's units of a kind: 1 = cut."""
    return f"{kind}.cut"


def bias_name(linear: str) -> str:
    """Tensor name of the whole bias of a matrix."""
    return f"{linear}.bias"


def scale_name(kind: str) -> str:
    """Tensor name of the scales of a block's units of a kind: 0 of those that are cut."""
    return f"{kind}.scale"


def cut_specs(
    plan: ModelPlan, biases: Sequence[str], scaled: Sequence[str] = ()
) -> dict[str, dict[str, TensorSpec]]:
    """The blobs that describe a smaller model, one per block; ``biases`` are matrices that get a bias, and ``scaled`` kinds
    whose units get a scale, both float32."""
    specs = {}
    for block in plan.blocks:
        units = units_of(plan, block)
        rows = {linear.name: linear.shape[0] for linear in block.linears}
        specs[block_key(block.index)] = {
            **{
                cut_name(kind): TensorSpec("U64", (num_words(getattr(units, kind)),))
                for kind in KINDS
            },
            **{bias_name(name): TensorSpec("F32", (rows[name],)) for name in biases},
            **{scale_name(kind): TensorSpec("F32", (getattr(units, kind),)) for kind in scaled},
        }
    return specs


def pack_cut(
    cut: Mapping[str, NDArray[np.bool_]],
    biases: Mapping[str, NDArray[np.float32]],
    scales: Mapping[str, NDArray[np.float32]] | None = None,
) -> bytes:
    """Serialise what is cut of a block, bool arrays by kind, its biases by canonical name, and its scales by kind."""
    bits = {cut_name(kind): pack(units) for kind, units in cut.items()}
    beside = {bias_name(name): bias for name, bias in biases.items()}
    return pack_tensors(
        {**bits, **beside, **{scale_name(kind): own for kind, own in (scales or {}).items()}}
    )


def unpack_cut(blob: bytes, units: Units) -> dict[str, NDArray[np.bool_]]:
    """What is cut of a block that has so many units: bool arrays by kind."""
    words = unpack_tensors(blob)
    return {kind: unpack(words[cut_name(kind)], (1, getattr(units, kind)))[0] for kind in KINDS}


def structure_of(
    plan: ModelPlan, blob_of: Callable[[int], bytes], biases: Sequence[str]
) -> Structure:
    """The structure that the blobs of all blocks describe."""
    whole = Structure.whole(plan)
    kept = dict[int, dict[str, list[int]]]()
    for index, units in enumerate(whole.base):
        bits = unpack_cut(blob_of(index), units)
        kept[index] = {kind: np.flatnonzero(~cut).tolist() for kind, cut in bits.items()}
    made = whole.keeping(kept)
    return Structure(made.base, made.blocks, tuple(biases))


def biases_of(blob: bytes, biases: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """The biases of a block, by canonical name."""
    tensors = unpack_tensors(blob)
    return {name: tensors[bias_name(name)] for name in biases}


def scales_of(blob: bytes) -> dict[str, NDArray[np.float32]]:
    """The scales of a block's units by kind; none of kinds that have no scales."""
    tensors = unpack_tensors(blob)
    return {kind: tensors[scale_name(kind)] for kind in KINDS if scale_name(kind) in tensors}


class SomeOfEachKindStays:
    """Checks that a block keeps a unit of each kind, that its biases are numbers, and its scales within their bounds."""

    def __init__(self, plan: ModelPlan) -> None:
        self._units = {block_key(block.index): units_of(plan, block) for block in plan.blocks}

    def __call__(self, key: str, blob: bytes) -> None:
        """Raise Mistake otherwise."""
        tensors = views(blob)
        for kind in KINDS:
            words = tensors[cut_name(kind)]
            number = getattr(self._units[key], kind)
            if not has_clean_padding(words, number):
                raise Mistake(f"{key} {kind}: bits are set beyond the last unit")
            if unpack(words, (1, number)).all():
                raise Mistake(f"{key} {kind}: all are cut, one must stay")
        if not all(
            np.isfinite(tensor).all() for name, tensor in tensors.items() if name.endswith(".bias")
        ):
            raise Mistake(f"{key}: a bias is no finite number")
        if not all(
            (np.abs(tensor) <= MOST_SCALE).all()
            for name, tensor in tensors.items()
            if name.endswith(".scale")
        ):
            raise Mistake(f"{key}: a scale is no number, or beyond {MOST_SCALE:g}")


def delivery_of_cuts(
    request: Letter,
    plan_of: PlanOf,
    run: RunSettings,
    biases: Sequence[str],
    scaled: Sequence[str] = (),
) -> Contract:
    """The contract of a ``deliver``: a part of what is cut, on its way to a client that evaluates it.

    Raises
    ------
    Mistake
        Nothing is delivered in this run, or there is no such part.
    """
    require_result_wanted(run)
    plan = plan_of()
    specs = cut_specs(plan, biases, scaled)
    delivery = Delivery(
        order=NoScalars,
        specs=specs,
        parts=parts_of(specs, run.part_bytes),
        observer=(
            "that the federated result arrived, nothing else; it is sent with `evaluation.own-text`"
        ),
        check_values=SomeOfEachKindStays(plan),
    )
    return delivery.contract(request, run.method)
