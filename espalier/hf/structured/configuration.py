"""``config.json`` of a smaller model, in the two forms that transformers can build: its own classes, or the family's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from espalier.hf.families import SLICED, STRUCTURED, Family
from espalier.models.plan import ModelPlan
from espalier.models.structure import LANES, Structure, as_ranges, units_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WIDTHS = "structure"
"""Key of ``config.json`` under which they are."""
STRUCTURE_FILE = "structure.json"
"""Beside a compact export: which units of which base it keeps."""

STRUCTURED_CLASS = "Structured"
"""How names of the classes of smaller models begin."""


def structured_config(
    base: Mapping[str, Any], family: Family, plan: ModelPlan, cut: Structure, structure: Structure
) -> dict[str, Any]:
    """The configuration of a model with blocks of unequal width.

    Parameters
    ----------
    base : ``config.json`` of the base, which may be a smaller model itself
    plan : of the smaller model
    cut : what it keeps of the base
    structure : what it keeps of the model that nothing was cut from
    """
    return _with_blocks(base, family, cut) | {
        "model_type": STRUCTURED + str(base["model_type"]).removeprefix(STRUCTURED),
        WIDTHS: _widths(plan, structure),
    }


def plain_config(
    document: Mapping[str, Any], family: Family, plan: ModelPlan, structure: Structure
) -> dict[str, Any] | None:
    """The same in the family's own terms; None where the blocks are not alike, or the family has no words for their shape.

    ``document`` is what ``structured_config`` gave.
    """
    (units, *others), was = {units_of(plan, block) for block in plan.blocks}, structure.base[0]
    if others or structure.cuts_lanes or structure.added_biases:
        return None
    config = {key: value for key, value in document.items() if key not in (WIDTHS, "auto_map")}
    if architectures := config.get("architectures"):  # of a base that is a smaller model itself
        config["architectures"] = [name.removeprefix(STRUCTURED_CLASS) for name in architectures]
    config["model_type"] = config["model_type"].removeprefix(STRUCTURED)
    if units.groups != was.groups:
        # Without such a key the heads share the width of the model among them.
        if not family.kv_heads_key:
            return None
        heads = units.groups * plan.heads_per_group
        # Transformers refuses it, whatever head_dim says.
        if family.name == "llama" and units.attn_reads % heads:
            return None
        config |= {
            "head_dim": plan.head_dim,
            family.query_heads_key: heads,
            family.kv_heads_key: units.groups,
        }
    if units.channels != was.channels:
        config[family.channels_key] = units.channels
    return config


def build_config(document: Mapping[str, Any]) -> "PretrainedConfig":
    """transformers' own object of a configuration, also of a smaller model's."""
    from transformers import AutoConfig

    kind = str(document.get("model_type"))
    if kind.startswith(STRUCTURED):
        import espalier.hf.structured.modeling_structured
    elif kind.startswith(SLICED):
        import espalier.hf.sliced.modeling_sliced  # noqa: F401 - makes its classes known

    return AutoConfig.for_model(**document)


def _with_blocks(base: Mapping[str, Any], family: Family, structure: Structure) -> dict[str, Any]:
    """A configuration with as many blocks as stay; what it lists for each block is listed for those."""
    config = dict(base)
    # Else transformers makes it of the new numbers.
    if config.get("use_sliding_window") and not config.get("layer_types"):
        config["layer_types"] = list(getattr(build_config(base), "layer_types", None) or ())
    sources = [block.source for block in structure.blocks]
    if isinstance(types := config.get("layer_types"), list) and len(types) == len(structure.base):
        config["layer_types"] = [types[source] for source in sources]
    config[family.num_blocks_key] = len(sources)
    return config


def _widths(plan: ModelPlan, structure: Structure) -> dict[str, Any]:
    units = [units_of(plan, block) for block in plan.blocks]
    lanes = [{kind: as_ranges(block.kept(kind)) for kind in LANES} for block in structure.blocks]
    return {
        "head_dim": plan.head_dim,
        "heads_per_group": plan.heads_per_group,
        "groups": [each.groups for each in units],
        "channels": [each.channels for each in units],
        "biases": list(structure.added_biases),
        "lanes": lanes if structure.cuts_lanes else None,
        **({"norm_of_read": True} if structure.cuts_lanes and structure.norm_of_read else {}),
    }
