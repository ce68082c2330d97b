"""Models of transformers whose residual stream was rotated and sliced (SliceGPT): the code beside such an export.

An export holds a copy of this file, so that ``from_pretrained(..., trust_remote_code=True)`` finds it; where Espalier is
installed, ``import espalier.hf.sliced.modeling_sliced`` does the same without remote code. It therefore imports torch and
transformers alone. ``config.json`` is that of the family with two keys of another meaning:

- ``hidden_size``: the width that is left of the residual stream; heads keep theirs, which ``head_dim`` says
- ``dense_hidden_size``: the width before

Each block has two linears more, ``attn_shortcut`` and ``mlp_shortcut``, through which the residual stream goes from the basis
in which attention, or the feed-forward part, reads it to the next one. Norms have no scale of their own: it is in the matrices
that read behind them, and so is the root of ``dense_hidden_size / hidden_size``, since a norm here takes its mean over fewer
numbers.
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


class _SlicedBlock:
    """A block whose residual branches lead from basis to basis."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[call-arg]  # that of transformers
        block: Any = self
        for name in ("attn_shortcut", "mlp_shortcut"):
            setattr(block, name, nn.Linear(config.hidden_size, config.hidden_size, bias=False))
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            as_before(norm, config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """(windows, tokens, hidden_size), in the basis of this block's attention -> the same in that of the next block's."""
        block: Any = self
        attended, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
        hidden_states = block.attn_shortcut(hidden_states) + attended
        return block.mlp_shortcut(hidden_states) + block.mlp(
            block.post_attention_layernorm(hidden_states)
        )


def as_before(norm: Any, config: Any) -> None:
    """Let a norm add what it added to the mean over all lanes, now that it takes the mean over fewer."""
    norm.variance_epsilon = config.rms_norm_eps * config.dense_hidden_size / config.hidden_size


class SlicedLlamaBlock(_SlicedBlock, LlamaDecoderLayer):
    """LLaMA's."""


class SlicedMistralBlock(_SlicedBlock, MistralDecoderLayer):
    """Mistral's."""


class SlicedQwen2Block(_SlicedBlock, Qwen2DecoderLayer):
    """Qwen2's."""


class SlicedQwen3Block(_SlicedBlock, Qwen3DecoderLayer):
    """Qwen3's."""


class _Sliced:
    """What the classes below add to those of transformers."""

    block: ClassVar[Any]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # that of transformers
        decoder: Any = self.model  # type: ignore[attr-defined]
        for index in range(len(decoder.layers)):
            decoder.layers[index] = self.block(config, index)
        as_before(decoder.norm, config)


class SlicedLlamaConfig(LlamaConfig):
    """LLaMA's, with ``dense_hidden_size``."""

    model_type = "sliced-llama"
    dense_hidden_size: int | None = None

    def validate_architecture(self) -> None:
        """Heads have a width of their own, so they need not share that of the residual stream."""


class SlicedMistralConfig(MistralConfig):
    """Mistral's, with ``dense_hidden_size``."""

    model_type = "sliced-mistral"
    dense_hidden_size: int | None = None


class SlicedQwen2Config(Qwen2Config):
    """Qwen2's, with ``dense_hidden_size``."""

    model_type = "sliced-qwen2"
    dense_hidden_size: int | None = None


class SlicedQwen3Config(Qwen3Config):
    """Qwen3's, with ``dense_hidden_size``."""

    model_type = "sliced-qwen3"
    dense_hidden_size: int | None = None


class SlicedLlamaForCausalLM(_Sliced, LlamaForCausalLM):
    """LLaMA with a narrower residual stream."""

    config_class = SlicedLlamaConfig
    block = SlicedLlamaBlock
    _no_split_modules: ClassVar = ["SlicedLlamaBlock"]


class SlicedMistralForCausalLM(_Sliced, MistralForCausalLM):
    """Mistral with a narrower residual stream."""

    config_class = SlicedMistralConfig
    block = SlicedMistralBlock
    _no_split_modules: ClassVar = ["SlicedMistralBlock"]


class SlicedQwen2ForCausalLM(_Sliced, Qwen2ForCausalLM):
    """Qwen2 with a narrower residual stream."""

    config_class = SlicedQwen2Config
    block = SlicedQwen2Block
    _no_split_modules: ClassVar = ["SlicedQwen2Block"]


class SlicedQwen3ForCausalLM(_Sliced, Qwen3ForCausalLM):
    """Qwen3 with a narrower residual stream."""

    config_class = SlicedQwen3Config
    block = SlicedQwen3Block
    _no_split_modules: ClassVar = ["SlicedQwen3Block"]


CLASSES: tuple[Any, ...] = (
    SlicedLlamaForCausalLM,
    SlicedMistralForCausalLM,
    SlicedQwen2ForCausalLM,
    SlicedQwen3ForCausalLM,
)


def register() -> None:
    """Make the classes known to transformers' Auto classes."""
    for model in CLASSES:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


register()
