"""Supported model families, and error messages for unsupported models."""

from collections.abc import Mapping
from typing import Any

from espalier.errors import InputError
from espalier.hf.families.family import Family
from espalier.hf.families.table import FAMILIES

PER_LAYER = "per_layer_config"
"""Key of ``config.json`` for values of single blocks; it is one of transformers."""
STRUCTURED = "structured-"
"""Prefix of ``model_type`` for a pruned model that transformers has no keys for.

Its family is that of its base.
"""
SLICED = "sliced-"
"""Prefix of ``model_type`` for a model whose residual stream was rotated and is narrower."""

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def has_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether the model needs classes of Espalier in addition to those of transformers."""
    has_own_type = str(config.get("model_type")).startswith((STRUCTURED, SLICED))
    return has_own_type or bool(config.get(PER_LAYER))


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a model by its ``config.json``.

    Parameters
    ----------
    config : content of ``config.json``
    where : name of the file, for error messages

    Raises
    ------
    InputError
        The model type is unknown, or the model is quantised or another mixture of experts. The
        message names the configuration key.
    """
    # Only weights as they were trained can be pruned or tuned.
    if config.get("quantization_config"):
        raise InputError(f"{where}: quantization_config is set; name the model before quantisation")
    model_type = config.get("model_type")
    # A pruned model has the family of its base.
    base_type = (
        model_type.removeprefix(STRUCTURED).removeprefix(SLICED)
        if isinstance(model_type, str)
        else None
    )
    family = next((entry for entry in FAMILIES if base_type in entry.model_types), None)
    if family is not None and family.experts:
        return family
    # Experts under other names would be taken for a dense model.
    for key in EXPERT_KEYS:
        if config.get(key):
            supported = " and ".join(entry.name for entry in FAMILIES if entry.experts)
            raise InputError(
                f"{where}: {key} = {config[key]!r}; mixture-of-experts models are supported only as"
                f" {supported}, and only for tuning attention; name one of these, or a dense model"
            )
    if family is not None:
        return family
    supported = ", ".join(name for entry in FAMILIES for name in entry.model_types)
    parts = "text_config" in config
    hint = " (it has parts for images or sound; name a model of text only)" if parts else ""
    raise InputError(
        f"{where}: model_type = {model_type!r} is not supported{hint}; supported are {supported}"
    )
