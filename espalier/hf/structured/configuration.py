"""``config.json`` of a pruned model, for Espalier's classes or for the classes of the family.

transformers describes blocks of different widths by ``per_layer_config``: a sparse map from the
index of a block to the values that differ from those of the whole model. Indices are text, padded
with zeros, as in ``PreTrainedConfig.to_dict`` of transformers 5.24.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.errors import InputError
from espalier.hf.families import PER_LAYER, SLICED, STRUCTURED, Family, has_own_code
from espalier.hf.opening.config_file import CONFIG, read_config
from espalier.models.plan import ModelPlan
from espalier.models.structure import RESIDUAL_KINDS, Sizes, Structure, as_ranges, sizes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STRUCTURE = "structure"
"""Key of ``config.json`` for parts of a structure that transformers has no keys for."""
GLOBAL_ACCESS = "allow_global_per_layer_attribute_access"
"""Key of ``config.json`` that lets transformers read values of the whole model.

Up to 5.24 the configurations of some families check the number of heads of the whole model and
would refuse a file whose blocks have their own, so that even its tokenizer could not be loaded.
"""
STRUCTURE_FILE = "structure.json"
"""File of a compact export that describes what it keeps of its base."""

BLOCK_KEYS = ("layer_types", "no_rope_layers")
"""Keys of ``config.json`` for lists with one value per block."""

STRUCTURED_CLASS = "Structured"
"""Prefix of the class names of models with parts that transformers has no keys for."""
UNEVEN_CLASS = "Uneven"
"""Prefix of the class names of models that ``per_layer_config`` describes."""

BIAS_KEYS = {
    ("llama", "attn.o"): "attention_bias",
    ("llama", "mlp.down"): "mlp_bias",
    ("qwen3", "attn.o"): "attention_bias",
    ("granite", "attn.o"): "attention_bias",
    ("granite", "mlp.down"): "mlp_bias",
    ("smollm3", "attn.o"): "attention_bias",
    ("smollm3", "mlp.down"): "mlp_bias",
    ("gemma2", "attn.o"): "attention_bias",
    ("gemma3", "attn.o"): "attention_bias",
}
"""Configuration keys that add biases to matrices, for families that have none by default."""
WITH_BIASES = ("opt", "bert", "roberta")
"""Families that have biases without a key."""
BIASED = {
    "attention_bias": ("attn.q", "attn.k", "attn.v", "attn.o"),
    "mlp_bias": ("mlp.gate", "mlp.up", "mlp.down"),
}
"""Matrices that get a bias by each key."""


def structured_config(
    base: Mapping[str, Any], family: Family, plan: ModelPlan, cut: Structure, structure: Structure
) -> dict[str, Any]:
    """Return the configuration of a model whose blocks have different widths, for Espalier.

    ``plain_config`` and ``uneven_config`` make configurations of transformers from it.

    Parameters
    ----------
    base : ``config.json`` of the base, which may be a pruned model itself
    family : family of the model
    plan : plan of the pruned model
    cut : structure relative to the base
    structure : structure relative to the original, uncut model
    """
    config = _without_widths(base)
    sources = [block.source for block in cut.blocks]
    for key in BLOCK_KEYS:
        # Otherwise transformers derives the values from the new block numbers. Without sliding
        # windows all blocks have the same type.
        derived = key == "no_rope_layers" or config.get("use_sliding_window", True)
        if key in family.block_keys and derived and not config.get(key):
            config[key] = list(getattr(build_config(base), key))
        # One value per block of the base: keep those of the remaining blocks.
        if isinstance(values := config.get(key), list) and len(values) == len(cut.base):
            config[key] = [values[source] for source in sources]
    config |= {
        family.num_blocks_key: len(sources),
        "model_type": STRUCTURED + config["model_type"],
        **_per_layer(family, plan, structure),
    }
    if entry := _structure_entry(family, plan, structure):
        config[STRUCTURE] = entry
    return config


def _without_widths(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without widths of blocks, and for the classes of the family."""
    # Everything that describes the former cut.
    removed_keys = (PER_LAYER, STRUCTURE, GLOBAL_ACCESS, "auto_map")
    config = {key: value for key, value in document.items() if key not in removed_keys}
    # The base may be a pruned model itself.
    if architectures := config.get("architectures"):
        config["architectures"] = [
            name.removeprefix(STRUCTURED_CLASS).removeprefix(UNEVEN_CLASS) for name in architectures
        ]
    config["model_type"] = str(config["model_type"]).removeprefix(STRUCTURED)
    return config


def _per_layer(family: Family, plan: ModelPlan, structure: Structure) -> dict[str, Any]:
    """Return the widths of the original model, and under ``per_layer_config`` those that differ.

    The result is empty if only whole blocks were removed.
    """
    uncut = _widths(family, plan, structure.base[0])
    sizes = [sizes_of(plan, block) for block in plan.blocks]
    # As transformers pads indices, so that they sort as numbers.
    digits = len(str(len(sizes) - 1))
    overrides = dict[str, dict[str, int]]()
    for index, block_sizes in enumerate(sizes):
        widths = _widths(family, plan, block_sizes).items()
        if differing := {key: value for key, value in widths if uncut[key] != value}:
            overrides[str(index).zfill(digits)] = differing
    if not overrides:
        return {}
    config: dict[str, Any] = uncut | {PER_LAYER: overrides}
    if any(family.query_heads_key in override for override in overrides.values()):
        config[GLOBAL_ACCESS] = True
        # Without such a key the heads share the width of the model among them.
        if family.kv_heads_key:
            config["head_dim"] = plan.head_dim
    return config


def _widths(family: Family, plan: ModelPlan, sizes: Sizes) -> dict[str, int]:
    """Return the widths of a block by configuration key."""
    groups = {family.kv_heads_key: sizes.groups} if family.kv_heads_key else {}
    return {
        family.query_heads_key: sizes.groups * plan.heads_per_group,
        **groups,
        family.channels_key: sizes.channels,
    }


def _structure_entry(family: Family, plan: ModelPlan, structure: Structure) -> dict[str, Any]:
    """Return the value of the key ``structure``: parts that transformers has no keys for."""
    entry: dict[str, Any] = {}
    # Without a key for key-value heads, the width of a head follows from the number of heads.
    if not family.kv_heads_key and _cuts_heads(plan, structure):
        entry["head_dim"] = plan.head_dim
    if structure.added_biases:
        entry["biases"] = list(structure.added_biases)
    if structure.cuts_residual:
        entry["residual_dimensions"] = [
            {kind: as_ranges(block.kept(kind)) for kind in RESIDUAL_KINDS}
            for block in structure.blocks
        ]
        if structure.norm_of_read:
            entry["norm_of_read"] = True
    return entry


def _cuts_heads(plan: ModelPlan, structure: Structure) -> bool:
    uncut = structure.base[0].groups
    return any(sizes_of(plan, block).groups != uncut for block in plan.blocks)


def bias_key(family: Family, linear: str) -> str | None:
    """Return the configuration key that gives a matrix a bias.

    The result is empty if the family needs no key, and None if it has none.
    """
    return "" if family.name in WITH_BIASES else BIAS_KEYS.get((family.name, linear))


def _family_config(
    document: Mapping[str, Any], family: Family, plan: ModelPlan, structure: Structure
) -> dict[str, Any] | None:
    """Return a pruned model's configuration without widths, with the keys of added biases.

    Returns None if the structure has other parts that the family has no keys for.
    """
    keys = [bias_key(family, name) for name in structure.added_biases]
    # Residual dimensions, head widths and some biases are unknown to transformers.
    without_head_dim = not family.kv_heads_key and _cuts_heads(plan, structure)
    if structure.cuts_residual or without_head_dim or None in keys:
        return None
    return _without_widths(document) | {key: True for key in keys if key}


def uneven_config(
    document: Mapping[str, Any], family: Family, plan: ModelPlan, structure: Structure
) -> dict[str, Any] | None:
    """Return the configuration of a pruned model with keys of transformers only.

    Blocks may have different widths. Returns None if transformers has no keys for the rest. The
    document is a result of ``structured_config``; plan and structure are those given to it.
    """
    config = _family_config(document, family, plan, structure)
    return None if config is None else config | _per_layer(family, plan, structure)


def plain_config(
    document: Mapping[str, Any], family: Family, plan: ModelPlan, structure: Structure
) -> dict[str, Any] | None:
    """Return the configuration of a pruned model for the classes of the family.

    Returns None if the blocks are not alike, or if the family cannot express their shape. The
    document is a result of ``structured_config``; plan and structure are those given to it.
    """
    # Blocks that differ have no common configuration.
    sizes, *other_sizes = {sizes_of(plan, block) for block in plan.blocks}
    config = _family_config(document, family, plan, structure)
    if other_sizes or config is None:
        return None
    if _cuts_heads(plan, structure):
        heads = sizes.groups * plan.heads_per_group
        # transformers requires this of some families even if head_dim is given.
        if family.name in ("llama", "gemma2", "gemma3") and sizes.attn_reads % heads:
            return None
        # transformers compares the number of Phi's factors for long texts with the number of heads.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if family.name == "phi3" and "short_factor" in rope:
            return None
        config["head_dim"] = plan.head_dim
    # Only values that differ from the original's are written.
    dense_widths = _widths(family, plan, structure.base[0])
    widths = _widths(family, plan, sizes)
    return config | {key: value for key, value in widths.items() if dense_widths[key] != value}


def build_config(document: Mapping[str, Any]) -> "PretrainedConfig":
    """Return the configuration object of transformers, also for a pruned model."""
    kind = str(document.get("model_type"))
    # Classes of this module have to be registered first.
    if has_own_code(document) and not kind.startswith(SLICED):
        from espalier.hf.structured.modeling_structured import CLASSES

        values = {key: value for key, value in document.items() if key != "model_type"}
        built: PretrainedConfig = _known(kind, CLASSES).config_class(**values)
        return built
    if kind.startswith(SLICED):
        import espalier.hf.sliced.modeling_sliced  # noqa: F401 - registers its classes

    from transformers import AutoConfig

    return AutoConfig.for_model(**document)


def _known(kind: str, classes: Mapping[str, Any]) -> Any:
    """Return the class of a model type with blocks of different widths."""
    if kind not in classes:
        raise InputError(
            f"config.json: {PER_LAYER} in a model of type {kind!r}, whose blocks can have only one"
            " width here; name a model without this key"
        )
    return classes[kind]


def load_config(directory: Path, **options: Any) -> "PretrainedConfig":
    """Load the configuration object of a directory; no code of the directory runs.

    Parameters
    ----------
    directory : model directory, also of a pruned model
    options : values that replace those of the file
    """
    # The file decides; nothing in the directory is executed.
    document = read_config(directory / CONFIG)
    load_options = {"local_files_only": True, **options}
    kind = str(document.get("model_type"))
    if has_own_code(document):
        build_config(document)
    # transformers would refuse widths of single blocks.
    if document.get(PER_LAYER) and not kind.startswith((STRUCTURED, SLICED)):
        from espalier.hf.structured.modeling_structured import CLASSES

        config_class = _known(kind, CLASSES).config_class
        config: PretrainedConfig = config_class.from_pretrained(directory, **load_options)
        return config
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory, trust_remote_code=False, **load_options)
