"""transformers models whose blocks have different widths.

A compact export contains a copy of this file, so that ``from_pretrained(...,
trust_remote_code=True)`` finds it. The module therefore imports only torch and transformers.
``config.json`` gives the width of each block under ``per_layer_config``, a key of transformers. It
maps the index of a block to the values that differ from those of the whole model, for example
``{"03": {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1210}}``. There
are two kinds of classes:

- ``Uneven...``: the widths are everything that differs from the family. ``model_type`` is that of
  the family, so that releases of transformers whose layers read the key need no remote code.
- ``Structured...``: transformers has no words for the rest, which is under ``structure``. The
  prefix ``structured-`` of ``model_type`` keeps transformers from ignoring it.

Keys of ``structure``, all optional:

- ``head_dim``: rows of a query, key or value matrix per head, in families without such a key
- ``biases``: matrices that have a bias even if the family gives them none: ``attn.o`` and
  ``mlp.down``
- ``residual_dimensions``: the residual dimensions that attention and feed-forward part of each
  block read and write, as ranges ``"0-3,7"``. Dimensions to read are selected after the norm. The
  output is placed in its dimensions, with zeros elsewhere.
- ``norm_of_read``: if true, a norm divides by the root mean square of the dimensions that are read,
  instead of all dimensions
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

LIKE_LLAMA = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
LIKE_PHI = {
    "attn.qkv": "self_attn.qkv_proj", "attn.o": "self_attn.o_proj",
    "mlp.gateup": "mlp.gate_up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
LIKE_OPT = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj", "attn.o": "self_attn.out_proj",
    "mlp.up": "fc1", "mlp.down": "fc2",
}  # fmt: skip
LIKE_BERT = {
    "attn.q": "attention.self.query", "attn.k": "attention.self.key",
    "attn.v": "attention.self.value", "attn.o": "attention.output.dense",
    "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
}  # fmt: skip
RESIDUAL_OF = {"attn": ("input_layernorm", "self_attn"), "mlp": ("post_attention_layernorm", "mlp")}
"""Norm after which residual dimensions are read, and module that writes, in models like LLaMA."""
RESIDUAL_OF_GEMMA = RESIDUAL_OF | {"mlp": ("pre_feedforward_layernorm", "mlp")}
"""The same in Gemma, which has another norm after attention."""


class ResidualDimensions:
    """Indices of residual dimensions, as a tensor on each device that uses them."""

    def __init__(self, dimensions: list[int]) -> None:
        self.dimensions = dimensions
        self._known: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the indices as a tensor on a device, (dimensions,), int64."""
        # Models are built on the meta device, so the tensor is created at first use.
        if device not in self._known:
            self._known[device] = torch.tensor(self.dimensions, device=device)
        return self._known[device]


class ReadDimensions(ResidualDimensions):
    """Forward hook of a norm that selects residual dimensions of its output."""

    def __call__(self, norm: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., dimensions)."""
        return output.index_select(-1, self.on(output.device))


class NormReadDimensions(ReadDimensions):
    """Forward hook of an RMS norm that also normalises by the selected dimensions only."""

    def __call__(self, norm: Any, inputs: Any, output: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., dimensions)."""
        squares = inputs[0].float().square()
        # Gemma has another name for it.
        epsilon = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
        # The norm has divided by the root mean square of all dimensions; correct its output.
        mean_square = squares.index_select(-1, self.on(output.device)).mean(-1, keepdim=True)
        factor = ((squares.mean(-1, keepdim=True) + epsilon) / (mean_square + epsilon)).sqrt()
        return (super().__call__(norm, inputs, output) * factor).to(output.dtype)


class WriteDimensions(ResidualDimensions):
    """Forward hook of attention or feed-forward part that expands the output to the full width."""

    def __init__(self, dimensions: list[int], width: int) -> None:
        super().__init__(dimensions)
        self.width = width

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Map (..., dimensions) to (..., hidden_size); in a tuple, only the first entry."""
        first = output[0] if isinstance(output, tuple) else output
        wide = first.new_zeros(*first.shape[:-1], self.width).index_copy(
            -1, self.on(first.device), first
        )
        return (wide, *output[1:]) if isinstance(output, tuple) else wide


class ConfigOfBlock:
    """Configuration of the model, with the number of heads of one block."""

    def __init__(self, config: Any, heads: int) -> None:
        self.of_model = config
        self.num_attention_heads = heads

    def __getattr__(self, name: str) -> Any:
        # A copy that is not complete yet has no configuration.
        if name == "of_model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.of_model, name)


@dataclass(frozen=True)
class Widths:
    """Widths of one block."""

    heads: int
    """Number of query heads."""
    groups: int
    """Number of key-value heads."""
    head_dim: int
    """Rows of a query, key or value matrix per head."""
    channels: int
    """Width of the feed-forward part."""


def keys_of(paths: dict[str, str]) -> tuple[str, str, str]:
    """Return the keys of query heads, key-value heads and feed-forward width of a family.

    The family has linears at ``paths``. The first two are equal if it has no key-value heads.
    """
    # A file may have keys of other families, which transformers ignores.
    heads = "num_attention_heads"
    groups = heads if paths in (LIKE_OPT, LIKE_BERT) else "num_key_value_heads"
    return heads, groups, "ffn_dim" if paths == LIKE_OPT else "intermediate_size"


def overrides_of(config: Any) -> dict[int, dict[str, Any]]:
    """Return ``per_layer_config`` by index of the block."""
    # Releases before 5 do not know the key, and keep the text of the file.
    entries = config.to_dict().get("per_layer_config") or {}
    return {int(index): dict(override) for index, override in entries.items()}


def widths_of(config: Any, paths: dict[str, str]) -> list[Widths]:
    """Return the widths of each block of a family with linears at ``paths``.

    Raises
    ------
    ValueError
        ``per_layer_config`` has other keys than the widths of a block, or a block does not exist.
    """
    values = config.to_dict()
    keys = keys_of(paths)
    overrides = overrides_of(config)
    for index, override in overrides.items():
        if unknown_keys := sorted(override.keys() - set(keys)):
            raise ValueError(
                f"per_layer_config: block {index} has {', '.join(unknown_keys)}; this code reads"
                f" only {', '.join(dict.fromkeys(keys))}"
            )
        if not 0 <= index < config.num_hidden_layers:
            raise ValueError(f"per_layer_config: block {index} does not exist")
    head_dim = (values.get("structure") or {}).get("head_dim") or values.get("head_dim")
    head_dim = head_dim or values["hidden_size"] // values[keys[0]]
    widths = []
    for index in range(config.num_hidden_layers):
        block_values = values | overrides.get(index, {})
        heads, groups, channels = (block_values[key] for key in keys)
        widths.append(Widths(heads, groups or heads, head_dim, channels))
    return widths


def numbers(text: str) -> list[int]:
    """Return the numbers of a text such as ``"0-3,7"``."""
    parts = (part.split("-") for part in text.split(","))
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


def narrow(
    blocks: Any,
    paths: dict[str, str],
    widths: list[Widths],
    structure: dict[str, Any],
    width: int,
) -> None:
    """Resize the linears of blocks, at ``paths``, to the widths of each block, without values.

    ``structure`` is that of ``config.json``, and ``width`` the hidden size of the model. Hooks read
    and write the residual dimensions.
    """
    for index, block in enumerate(blocks):
        block_widths = widths[index]
        key_rows = block_widths.groups * block_widths.head_dim
        query_rows = block_widths.heads * block_widths.head_dim
        channels = block_widths.channels
        ranges = structure.get("residual_dimensions") or [{}] * len(blocks)
        dimensions = {name: numbers(text) for name, text in ranges[index].items()}
        reads = {part: len(dimensions.get(f"{part}_reads", range(width))) for part in RESIDUAL_OF}
        writes = {part: len(dimensions.get(f"{part}_writes", range(width))) for part in RESIDUAL_OF}
        shapes = {
            "attn.q": (query_rows, reads["attn"]),
            "attn.k": (key_rows, reads["attn"]), "attn.v": (key_rows, reads["attn"]),
            "attn.qkv": (query_rows + 2 * key_rows, reads["attn"]),
            "attn.o": (writes["attn"], query_rows),
            "mlp.gate": (channels, reads["mlp"]), "mlp.up": (channels, reads["mlp"]),
            "mlp.gateup": (2 * channels, reads["mlp"]),
            "mlp.down": (writes["mlp"], channels),
        }  # fmt: skip
        for name, path in paths.items():
            linear = block.get_submodule(path)
            bias = linear.bias is not None
            needs_bias = bias or name in structure.get("biases", ())
            if tuple(linear.weight.shape) != shapes[name] or bias != needs_bias:
                rows, columns = shapes[name]
                factory_kwargs = {"device": linear.weight.device, "dtype": linear.weight.dtype}
                block.set_submodule(path, nn.Linear(columns, rows, needs_bias, **factory_kwargs))
        query = paths.get("attn.q") or paths["attn.qkv"]
        attention = block.get_submodule(query.rpartition(".")[0])
        # The code of some families reads the number of heads from these attributes.
        for attribute in ("num_heads", "num_attention_heads"):
            if hasattr(attention, attribute):
                setattr(attention, attribute, block_widths.heads)
        for attribute, value in (
            ("num_key_value_heads", block_widths.groups),
            ("num_key_value_groups", block_widths.heads // block_widths.groups),
        ):
            if hasattr(attention, attribute):
                setattr(attention, attribute, value)
        if "attn.qkv" in paths:
            # Phi splits the fused matrix by the number of heads in the configuration.
            attention.config = ConfigOfBlock(attention.config, block_widths.heads)
        if not dimensions:
            continue
        all_dimensions = list(range(width))
        reading = NormReadDimensions if structure.get("norm_of_read") else ReadDimensions
        is_gemma = hasattr(block, "pre_feedforward_layernorm")
        for part, (norm, module) in (RESIDUAL_OF_GEMMA if is_gemma else RESIDUAL_OF).items():
            if (read := dimensions[f"{part}_reads"]) != all_dimensions:
                block.get_submodule(norm).register_forward_hook(reading(read))
            if (written := dimensions[f"{part}_writes"]) != all_dimensions:
                block.get_submodule(module).register_forward_hook(WriteDimensions(written, width))


class _Structured:
    """Mixin that resizes the blocks of a transformers model."""

    paths: ClassVar[dict[str, str]]
    blocks: ClassVar[str]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        widths = widths_of(config, self.paths)
        overrides = overrides_of(config)
        # The layers of transformers read the widths of the whole model, which it refuses as long
        # as blocks have their own.
        if overrides:
            config.per_layer_config = None
        # The next class in the MRO is the model of transformers.
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if overrides:
            config.per_layer_config = overrides
        module: Any = self
        structure = getattr(config, "structure", None) or {}
        blocks = module.get_submodule(self.blocks)
        narrow(blocks, self.paths, widths, structure, config.hidden_size)


FAMILIES: tuple[tuple[Any, Any, dict[str, str], str], ...] = (
    (LlamaConfig, LlamaForCausalLM, LIKE_LLAMA, "model.layers"),
    (MistralConfig, MistralForCausalLM, LIKE_LLAMA, "model.layers"),
    (Qwen2Config, Qwen2ForCausalLM, LIKE_LLAMA, "model.layers"),
    (Qwen3Config, Qwen3ForCausalLM, LIKE_LLAMA, "model.layers"),
    (GraniteConfig, GraniteForCausalLM, LIKE_LLAMA, "model.layers"),
    (SmolLM3Config, SmolLM3ForCausalLM, LIKE_LLAMA, "model.layers"),
    (Olmo2Config, Olmo2ForCausalLM, LIKE_LLAMA, "model.layers"),
    (Gemma2Config, Gemma2ForCausalLM, LIKE_LLAMA, "model.layers"),
    (Gemma3TextConfig, Gemma3ForCausalLM, LIKE_LLAMA, "model.layers"),
    (Phi3Config, Phi3ForCausalLM, LIKE_PHI, "model.layers"),
    (OPTConfig, OPTForCausalLM, LIKE_OPT, "model.decoder.layers"),
    (BertConfig, BertForSequenceClassification, LIKE_BERT, "bert.encoder.layer"),
    (RobertaConfig, RobertaForSequenceClassification, LIKE_BERT, "roberta.encoder.layer"),
    (XLMRobertaConfig, XLMRobertaForSequenceClassification, LIKE_BERT, "roberta.encoder.layer"),
)


def _accept(config: Any) -> None:
    """Skip a check of the family, which compares widths of the whole model."""


def _class_of(config: Any, model: Any, paths: dict[str, str], blocks: str, prefix: str) -> Any:
    """Return the model class of a family, with its configuration class ``config_class``.

    ``prefix`` is that of the names: ``Uneven`` or ``Structured``.
    """
    config_members = {"__module__": __name__, "validate_architecture": _accept}
    if prefix == "Structured":
        config_members |= {
            "__annotations__": {"structure": dict[str, Any] | None},
            "model_type": f"structured-{config.model_type}",
            "structure": None,
        }
    members = {
        "__module__": __name__,
        "config_class": type(f"{prefix}{config.__name__}", (config,), config_members),
        "paths": paths,
        "blocks": blocks,
    }
    return type(f"{prefix}{model.__name__}", (_Structured, model), members)


CLASSES: dict[str, Any] = {
    cls.config_class.model_type: cls
    for prefix in ("Uneven", "Structured")
    for cls in (_class_of(*family, prefix) for family in FAMILIES)
}
"""Model class by ``model_type``."""


def register() -> None:
    """Register the classes with transformers' Auto classes, and under their names here.

    transformers finds the classes of a compact export by name. The types of the families stay with
    transformers' own classes.
    """
    for kind, model in CLASSES.items():
        globals()[model.__name__] = model
        globals()[model.config_class.__name__] = model.config_class
        auto = (
            AutoModelForCausalLM
            if model.__name__.endswith("CausalLM")
            else AutoModelForSequenceClassification
        )
        if kind.startswith("structured-"):
            AutoConfig.register(kind, model.config_class, exist_ok=True)
        auto.register(model.config_class, model, exist_ok=True)


register()
