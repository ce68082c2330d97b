"""Models of transformers some of whose blocks are narrower than the others: the code beside a compact export.

An export holds a copy of this file, so that ``from_pretrained(..., trust_remote_code=True)`` finds it; where Espalier is
installed, ``import espalier.hf.structured.modeling_structured`` does the same without remote code. It therefore imports
torch and transformers alone. ``config.json`` says how wide each block is, under ``structure``:

- ``head_dim``: rows of a query, key or value matrix that are one head
- ``heads_per_group``: query heads that share a head of keys and values
- ``groups``, ``channels``: for each block, the number of its key-value groups and of its feed-forward channels
- ``biases``: matrices that have a bias whether or not the family gives them one, ``attn.o`` and ``mlp.down``
- ``lanes``: null, or for each block which lanes of the residual stream attention and feed-forward part read and write, as
  ranges ``"0-3,7"``; what is read is selected behind the norm, what is written is put in its lanes among zeros
- ``norm_of_read``: where it is true, a norm divides by the root mean square of the lanes that are read, not of all
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

LIKE_LLAMA = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
LIKE_OPT = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.out_proj",
    "mlp.up": "fc1", "mlp.down": "fc2",
}  # fmt: skip
LIKE_BERT = {
    "attn.q": "attention.self.query", "attn.k": "attention.self.key", "attn.v": "attention.self.value",
    "attn.o": "attention.output.dense", "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
}  # fmt: skip
LANES_OF = {"attn": ("input_layernorm", "self_attn"), "mlp": ("post_attention_layernorm", "mlp")}
"""Norm behind which lanes are read, and module whose output is written, in families like LLaMA."""


class Lanes:
    """Numbers of residual lanes, on the device that asks for them."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes
        self._known: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """(lanes,), int64; made when they are first asked for: models are built on no device at all."""
        if device not in self._known:
            self._known[device] = torch.tensor(self.lanes, device=device)
        return self._known[device]


class ReadLanes(Lanes):
    """Forward hook of a norm: selects lanes of what it gives."""

    def __call__(self, norm: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """(..., width) -> (..., lanes)."""
        return output.index_select(-1, self.on(output.device))


class NormReadLanes(ReadLanes):
    """The same of an RMS norm that is to see the selected lanes alone."""

    def __call__(self, norm: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """(..., width) -> (..., lanes)."""
        squares, epsilon = inputs[0].float().square(), float(norm.variance_epsilon)  # type: ignore[arg-type]
        seen = squares.index_select(-1, self.on(output.device)).mean(-1, keepdim=True)
        factor = ((squares.mean(-1, keepdim=True) + epsilon) / (seen + epsilon)).sqrt()
        return (super().__call__(norm, inputs, output) * factor).to(output.dtype)


class WriteLanes(Lanes):
    """Forward hook of attention or feed-forward part: puts its output in its lanes, among zeros."""

    def __init__(self, lanes: list[int], width: int) -> None:
        super().__init__(lanes)
        self.width = width

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """(..., lanes) -> (..., width); of a tuple the first."""
        first = output[0] if isinstance(output, tuple) else output
        wide = first.new_zeros(*first.shape[:-1], self.width).index_copy(
            -1, self.on(first.device), first
        )
        return (wide, *output[1:]) if isinstance(output, tuple) else wide


def numbers(text: str) -> list[int]:
    """``"0-3,7"`` as numbers."""
    parts = (part.split("-") for part in text.split(","))
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


def narrow(blocks: Any, paths: dict[str, str], structure: dict[str, Any], width: int) -> None:
    """Make the linears of blocks as wide as the structure says, without values; lanes are read and written by hooks."""
    for index, block in enumerate(blocks):
        heads = structure["groups"][index] * structure["heads_per_group"]
        key_rows = structure["groups"][index] * structure["head_dim"]
        query_rows = key_rows * structure["heads_per_group"]
        channels = structure["channels"][index]
        lanes = {
            name: numbers(text)
            for name, text in (structure["lanes"] or [{}] * len(blocks))[index].items()
        }
        reads = {part: len(lanes.get(f"{part}_reads", range(width))) for part in LANES_OF}
        writes = {part: len(lanes.get(f"{part}_writes", range(width))) for part in LANES_OF}
        shapes = {
            "attn.q": (query_rows, reads["attn"]), "attn.k": (key_rows, reads["attn"]), "attn.v": (key_rows, reads["attn"]),
            "attn.o": (writes["attn"], query_rows), "mlp.gate": (channels, reads["mlp"]), "mlp.up": (channels, reads["mlp"]),
            "mlp.down": (writes["mlp"], channels),
        }  # fmt: skip
        for name, path in paths.items():
            _resize(block, path, shapes[name], name in structure["biases"])
        attention = block.get_submodule(paths["attn.q"].rpartition(".")[0])
        # Where the code of the family asks for them.
        for attribute in ("num_heads", "num_attention_heads"):
            if hasattr(attention, attribute):
                setattr(attention, attribute, heads)
        if lanes:
            _route(
                block, lanes, width, NormReadLanes if structure.get("norm_of_read") else ReadLanes
            )


def _resize(block: nn.Module, path: str, shape: tuple[int, int], bias: bool) -> None:
    linear: Any = block.get_submodule(path)
    bias = bias or linear.bias is not None
    if tuple(linear.weight.shape) != shape or bias != (linear.bias is not None):
        fresh = nn.Linear(
            shape[1], shape[0], bias, device=linear.weight.device, dtype=linear.weight.dtype
        )
        block.set_submodule(path, fresh)


def _route(
    block: nn.Module, lanes: dict[str, list[int]], width: int, reading: type[ReadLanes]
) -> None:
    for part, (norm, module) in LANES_OF.items():
        if (read := lanes[f"{part}_reads"]) != list(range(width)):
            block.get_submodule(norm).register_forward_hook(reading(read))
        if (written := lanes[f"{part}_writes"]) != list(range(width)):
            block.get_submodule(module).register_forward_hook(WriteLanes(written, width))


class _Structured:
    """What the classes below add to those of transformers."""

    paths: ClassVar[dict[str, str]]
    blocks: ClassVar[str]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # that of transformers
        module: Any = self
        narrow(module.get_submodule(self.blocks), self.paths, config.structure, config.hidden_size)


class StructuredLlamaConfig(LlamaConfig):
    """LLaMA's, with ``structure``."""

    model_type = "structured-llama"
    structure: dict[str, Any] | None = None


class StructuredMistralConfig(MistralConfig):
    """Mistral's, with ``structure``."""

    model_type = "structured-mistral"
    structure: dict[str, Any] | None = None


class StructuredQwen2Config(Qwen2Config):
    """Qwen2's, with ``structure``."""

    model_type = "structured-qwen2"
    structure: dict[str, Any] | None = None


class StructuredQwen3Config(Qwen3Config):
    """Qwen3's, with ``structure``."""

    model_type = "structured-qwen3"
    structure: dict[str, Any] | None = None


class StructuredOPTConfig(OPTConfig):
    """OPT's, with ``structure``."""

    model_type = "structured-opt"
    structure: dict[str, Any] | None = None


class StructuredBertConfig(BertConfig):
    """BERT's, with ``structure``."""

    model_type = "structured-bert"
    structure: dict[str, Any] | None = None


class StructuredRobertaConfig(RobertaConfig):
    """RoBERTa's, with ``structure``."""

    model_type = "structured-roberta"
    structure: dict[str, Any] | None = None


class StructuredXLMRobertaConfig(XLMRobertaConfig):
    """XLM-RoBERTa's, with ``structure``."""

    model_type = "structured-xlm-roberta"
    structure: dict[str, Any] | None = None


class StructuredLlamaForCausalLM(_Structured, LlamaForCausalLM):
    """LLaMA with blocks of unequal width."""

    config_class = StructuredLlamaConfig
    paths = LIKE_LLAMA
    blocks = "model.layers"


class StructuredMistralForCausalLM(_Structured, MistralForCausalLM):
    """Mistral with blocks of unequal width."""

    config_class = StructuredMistralConfig
    paths = LIKE_LLAMA
    blocks = "model.layers"


class StructuredQwen2ForCausalLM(_Structured, Qwen2ForCausalLM):
    """Qwen2 with blocks of unequal width."""

    config_class = StructuredQwen2Config
    paths = LIKE_LLAMA
    blocks = "model.layers"


class StructuredQwen3ForCausalLM(_Structured, Qwen3ForCausalLM):
    """Qwen3 with blocks of unequal width."""

    config_class = StructuredQwen3Config
    paths = LIKE_LLAMA
    blocks = "model.layers"


class StructuredOPTForCausalLM(_Structured, OPTForCausalLM):
    """OPT with blocks of unequal width."""

    config_class = StructuredOPTConfig
    paths = LIKE_OPT
    blocks = "model.decoder.layers"


class StructuredBertForSequenceClassification(_Structured, BertForSequenceClassification):
    """BERT with blocks of unequal width."""

    config_class = StructuredBertConfig
    paths = LIKE_BERT
    blocks = "bert.encoder.layer"


class StructuredRobertaForSequenceClassification(_Structured, RobertaForSequenceClassification):
    """RoBERTa with blocks of unequal width."""

    config_class = StructuredRobertaConfig
    paths = LIKE_BERT
    blocks = "roberta.encoder.layer"


class StructuredXLMRobertaForSequenceClassification(
    _Structured, XLMRobertaForSequenceClassification
):
    """XLM-RoBERTa with blocks of unequal width."""

    config_class = StructuredXLMRobertaConfig
    paths = LIKE_BERT
    blocks = "roberta.encoder.layer"


CLASSES: tuple[Any, ...] = (
    StructuredLlamaForCausalLM,
    StructuredMistralForCausalLM,
    StructuredQwen2ForCausalLM,
    StructuredQwen3ForCausalLM,
    StructuredOPTForCausalLM,
    StructuredBertForSequenceClassification,
    StructuredRobertaForSequenceClassification,
    StructuredXLMRobertaForSequenceClassification,
)


def register() -> None:
    """Make the classes known to transformers' Auto classes."""
    for model in CLASSES:
        auto = (
            AutoModelForCausalLM
            if model.__name__.endswith("CausalLM")
            else AutoModelForSequenceClassification
        )
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        auto.register(model.config_class, model, exist_ok=True)


register()
