"""Reader of LoRA adapters in peft's format, for merging and conversion."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from espalier.environment.hub_models import ADAPTER
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import Edits
from espalier.hf.whole.adapters import updated
from espalier.models.adapter_config import WEIGHTS, read_adapter_config
from pruning_kernels.lora.factors import Factors

PREFIX = "base_model.model."
"""Beginning of the names of all tensors of an adapter."""
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OTHER_KINDS = (
    "use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "alora_invocation_tokens",
    "rank_pattern", "alpha_pattern", "trainable_token_indices", "layer_replication",
    "fan_in_fan_out",
)  # fmt: skip
"""Keys of ``adapter_config.json`` that change what an adapter computes, or train more than LoRA."""
KINDS = ("weight", "bias")

Adapted = dict[int, dict[str, Factors]]
"""Factors by block and canonical name of the matrix."""


def read_adapter(folder: Path, model: OpenedModel) -> Adapted:
    """Return the factors of a LoRA adapter, without the classification head of an encoder.

    Raises InputError if a file is missing, the adapter trains more than LoRA matrices and that
    head, or it adapts other matrices than the base model has.

    Parameters
    ----------
    folder : directory with ``adapter_config.json`` and ``adapter_model.safetensors``
    model : the base model of the adapter
    """
    scaling = _scaling(folder / ADAPTER, model)
    path = folder / WEIGHTS
    sides: dict[tuple[int, str], dict[str, Tensor]] = {}
    heads = _head_names(model)
    for name, value in _tensors(path).items():
        if name in heads:
            continue
        index, linear, side = _place(name, model, path)
        sides.setdefault((index, linear), {})[side] = value
    adapted: Adapted = {}
    for (index, linear), factors in sides.items():
        rows, columns = model.plan.blocks[index].linear(linear).shape
        # Both sides of a matrix, of one rank, and of the shape of the base's matrix.
        if factors.keys() != {"A", "B"} or (len(factors["B"]), factors["A"].shape[1]) != (
            rows,
            columns,
        ):
            raise InputError(
                f"{path}: {linear} of block {index} does not fit the base model in"
                f" {model.directory}; name the base that the adapter was trained on"
            )
        adapted.setdefault(index, {})[linear] = Factors(factors["B"], factors["A"], scaling)
    return adapted


def read_head(folder: Path, model: OpenedModel) -> dict[str, Tensor]:
    """Return the tensors of an encoder's classification head by canonical name.

    Raises InputError if the file is missing or has no head. Parameters are those of
    ``read_adapter``.
    """
    tensors = _tensors(folder / WEIGHTS)
    found = {own: tensors[name] for name, own in _head_names(model).items() if name in tensors}
    if not found:
        raise InputError(f"{folder / WEIGHTS}: has no classification head; name a completed run")
    return found


def _head_names(model: OpenedModel) -> dict[str, str]:
    """Return the canonical names of a head's tensors by their names in an adapter."""
    own = [f"{module}.{kind}" for module in model.family.head_linears for kind in KINDS]
    return {f"{PREFIX}{model.family.parameter_path(name, None)}": name for name in own}


def _scaling(path: Path, model: OpenedModel) -> float:
    """Return ``alpha / rank`` of an adapter of plain LoRA."""
    config = read_adapter_config(path)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type = {config.get('peft_type')!r}: must be 'LORA'")
    # Any of these makes the update something else than B A times a factor.
    kinds = OTHER_KINDS if model.family.head_linears else (*OTHER_KINDS, "modules_to_save")
    if further := [key for key in kinds if config.get(key)]:
        raise InputError(
            f"{path}: {further[0]} = {config[further[0]]!r}: only plain LoRA of matrices can be"
            " merged or converted; load the adapter with peft"
        )
    scaling: float = config["lora_alpha"] / config["r"]
    return scaling


def _tensors(path: Path) -> Mapping[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy it again") from None


def _place(name: str, model: OpenedModel, path: Path) -> tuple[int, str, str]:
    """Return block, canonical name of the matrix and side, ``A`` or ``B``, of a tensor."""
    match = NAME.fullmatch(name)
    found = model.family.block_of(match[1]) if match else None
    if match is not None and found is not None:
        _, index, module = found
        for linear, own in model.family.linears.items():
            if own == module and index < len(model.plan.blocks):
                return index, linear, match[2]
    raise InputError(
        f"{path}: {name} is no LoRA matrix of the base model in {model.directory}; name the base"
        " that the adapter was trained on"
    )


def edits_of(adapted: Adapted) -> Edits:
    """Return the edits that merge an adapter into its base model."""
    return lambda index: {
        name: partial(updated, factors, False) for name, factors in adapted.get(index, {}).items()
    }
