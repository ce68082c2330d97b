"""``config.json`` of a pruned model, for Espalier's classes or for the classes of the family."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from espalier.hf.families import SLICED, STRUCTURED, Family
from espalier.models.plan import ModelPlan
from espalier.models.structure import RESIDUAL_KINDS, Structure, as_ranges, sizes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WIDTHS = "structure"
"""Key of ``config.json`` for the widths of the blocks."""
STRUCTURE_FILE = "structure.json"
"""File of a compact export that describes what it keeps of its base."""

BLOCK_KEYS = ("layer_types", "no_rope_layers")
"""Keys of ``config.json`` for lists with one value per block."""

STRUCTURED_CLASS = "Structured"
"""Prefix of the class names of pruned models."""


def structured_config(
    base: Mapping[str, Any], family: Family, plan: ModelPlan, cut: Structure, structure: Structure
) -> dict[str, Any]:
    """Return the configuration of a model whose blocks have different widths.

    Parameters
    ----------
    base : ``config.json`` of the base, which may be a pruned model itself
    family : family of the model
    plan : plan of the pruned model
    cut : structure relative to the base
    structure : structure relative to the original, uncut model
    """
    config = dict(base)
    sources = [block.source for block in cut.blocks]
    for key in BLOCK_KEYS:
        # Otherwise transformers derives the values from the new block numbers. Without sliding
        # windows all blocks have the same type.
        derived = key == "no_rope_layers" or config.get("use_sliding_window", True)
        if key in family.block_keys and derived and not config.get(key):
            config[key] = list(getattr(build_config(base), key))
        if isinstance(values := config.get(key), list) and len(values) == len(cut.base):
            config[key] = [values[source] for source in sources]
    sizes = [sizes_of(plan, block) for block in plan.blocks]
    lanes = [
        {kind: as_ranges(block.kept(kind)) for kind in RESIDUAL_KINDS} for block in structure.blocks
    ]
    widths = {
        "head_dim": plan.head_dim,
        "heads_per_group": plan.heads_per_group,
        "groups": [own.groups for own in sizes],
        "channels": [own.channels for own in sizes],
        "biases": list(structure.added_biases),
        "lanes": lanes if structure.cuts_residual else None,
    }
    if structure.cuts_residual and structure.norm_of_read:
        widths["norm_of_read"] = True
    return config | {
        family.num_blocks_key: len(sources),
        "model_type": STRUCTURED + str(base["model_type"]).removeprefix(STRUCTURED),
        WIDTHS: widths,
    }


def plain_config(
    document: Mapping[str, Any], family: Family, plan: ModelPlan, structure: Structure
) -> dict[str, Any] | None:
    """Return the configuration of a pruned model for the classes of the family.

    Returns None if the blocks are not alike, or if the family cannot express their shape. The
    document is a result of ``structured_config``; plan and structure are those given to it.
    """
    sizes, *others = {sizes_of(plan, block) for block in plan.blocks}
    was = structure.base[0]
    if others or structure.cuts_residual or structure.added_biases:
        return None
    config = {key: value for key, value in document.items() if key not in (WIDTHS, "auto_map")}
    # The base may be a pruned model itself.
    if architectures := config.get("architectures"):
        config["architectures"] = [name.removeprefix(STRUCTURED_CLASS) for name in architectures]
    config["model_type"] = config["model_type"].removeprefix(STRUCTURED)
    if sizes.groups != was.groups:
        # Without such a key the heads share the width of the model among them.
        if not family.kv_heads_key:
            return None
        heads = sizes.groups * plan.heads_per_group
        # transformers requires this of some families even if head_dim is given.
        if family.name in ("llama", "gemma2", "gemma3") and sizes.attn_reads % heads:
            return None
        # transformers compares the number of Phi's factors for long texts with the number of heads.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if family.name == "phi3" and "short_factor" in rope:
            return None
        config |= {
            "head_dim": plan.head_dim,
            family.query_heads_key: heads,
            family.kv_heads_key: sizes.groups,
        }
    if sizes.channels != was.channels:
        config[family.channels_key] = sizes.channels
    return config


def build_config(document: Mapping[str, Any]) -> "PretrainedConfig":
    """Return the configuration object of transformers, also for a pruned model."""
    from transformers import AutoConfig

    kind = str(document.get("model_type"))
    if kind.startswith(STRUCTURED):
        import espalier.hf.structured.modeling_structured
    elif kind.startswith(SLICED):
        import espalier.hf.sliced.modeling_sliced  # noqa: F401 - registers its classes

    return AutoConfig.for_model(**document)
