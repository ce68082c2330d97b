"""Reader of LoRA adapters in peft's format, for merging and conversion."""

import re
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from espalier.environment.bounded_json import read_json_object
from espalier.environment.hub_models import ADAPTER
from espalier.errors import InputError
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.edits import Edits
from espalier.hf.whole.adapters import updated
from pruning_kernels.lora.factors import Factors

WEIGHTS = "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OTHER_KINDS = (
    "use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "alora_invocation_tokens",
    "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices",
    "layer_replication", "fan_in_fan_out",
)  # fmt: skip
"""Keys of ``adapter_config.json`` that change what an adapter computes, or train more than LoRA."""

Adapted = dict[int, dict[str, Factors]]
"""Factors by block and canonical name of the matrix."""


def read_adapter(folder: Path, model: OpenedModel) -> Adapted:
    """Return the factors of a LoRA adapter of a decoder.

    Parameters
    ----------
    folder : directory with ``adapter_config.json`` and ``adapter_model.safetensors``
    model : the base model of the adapter

    Raises
    ------
    InputError
        A file is missing, the adapter trains more than LoRA matrices, such as a classification
        head, or it adapts other matrices than the base model has.
    """
    path = folder / ADAPTER
    config = read_json_object(path)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type = {config.get('peft_type')!r}: must be 'LORA'")
    if further := [key for key in OTHER_KINDS if config.get(key)]:
        raise InputError(
            f"{path}: {further[0]} = {config[further[0]]!r}: only plain LoRA of matrices can be"
            " merged or converted; load the adapter with peft"
        )
    paths = {module: linear for linear, module in model.family.linears.items()}
    sides: dict[tuple[int, str], dict[str, object]] = {}
    try:
        tensors = load_file(folder / WEIGHTS)
    except OSError as error:
        raise InputError(f"{folder / WEIGHTS}: cannot be read ({error}); copy it again") from None
    for name, value in tensors.items():
        match = NAME.fullmatch(name)
        place = model.family.block_of(f"{match[1]}.") if match else None
        linear = paths.get(place[2].removesuffix(".")) if place else None
        if match is None or place is None or linear is None:
            raise InputError(f"{folder / WEIGHTS}: {name} is no LoRA matrix of the base model")
        sides.setdefault((place[1], linear), {})[match[2]] = value
    found: Adapted = {}
    for (index, linear), own in sides.items():
        a, b = (own.get(side) for side in "AB")
        rows, columns = _shape(model, index, linear, folder)
        if a is None or b is None or (b.shape[0], a.shape[1]) != (rows, columns):  # type: ignore[attr-defined]
            raise InputError(
                f"{folder / WEIGHTS}: {linear} of block {index} does not fit the base model in"
                f" {model.directory}; name the base that the adapter was trained on"
            )
        found.setdefault(index, {})[linear] = Factors(b, a, config["lora_alpha"] / config["r"])  # type: ignore[arg-type]
    return found


def _shape(model: OpenedModel, index: int, linear: str, folder: Path) -> tuple[int, int]:
    if index >= len(model.plan.blocks):
        raise InputError(
            f"{folder / WEIGHTS}: adapts block {index}, and the base model in {model.directory} has"
            f" {len(model.plan.blocks)} blocks; name the base that the adapter was trained on"
        )
    rows, columns = model.plan.blocks[index].linear(linear).shape
    return rows, columns


def edits_of(adapted: Adapted) -> Edits:
    """Return the edits that merge an adapter into its base model."""
    return lambda index: {
        name: partial(updated, factors, False) for name, factors in adapted.get(index, {}).items()
    }
