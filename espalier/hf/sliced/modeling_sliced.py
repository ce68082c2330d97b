"""transformers models with a rotated and sliced residual stream (SliceGPT).

An export contains a copy of this file, so that ``from_pretrained(..., trust_remote_code=True)``
finds it. If Espalier is installed, ``import espalier.hf.sliced.modeling_sliced`` has the same
effect without remote code. The module therefore imports only torch and transformers.
``config.json`` is that of the family with two keys:

- ``hidden_size``: width of the sliced residual stream; the width of the heads is unchanged and
  given by ``head_dim``
- ``dense_hidden_size``: width before slicing

Each block has two additional linears, ``attn_shortcut`` and ``mlp_shortcut``. They map the residual
stream from the basis of the attention, or of the feed-forward part, to the next basis. Norms have
no scale of their own. The scale is merged into the matrices that read the output of the norm. So is
the factor ``sqrt(dense_hidden_size / hidden_size)``, because a norm here averages over fewer
dimensions.
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer


class _SlicedBlock:
    """Block whose residual connections map from one basis to the next."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        # The next class in the MRO is the block of transformers.
        super().__init__(config, layer_idx)  # type: ignore[call-arg]
        block: Any = self
        for name in ("attn_shortcut", "mlp_shortcut"):
            setattr(block, name, nn.Linear(config.hidden_size, config.hidden_size, bias=False))
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            as_before(norm, config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Map hidden states from this block's basis to the next block's.

        Both have shape (batch, sequence_length, hidden_size).
        """
        block: Any = self
        # Granite scales what a block adds.
        scale = getattr(block, "residual_multiplier", 1.0)
        attended, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
        hidden_states = block.attn_shortcut(hidden_states) + attended * scale
        mapped = block.mlp(block.post_attention_layernorm(hidden_states))
        return block.mlp_shortcut(hidden_states) + mapped * scale


def as_before(norm: Any, config: Any) -> None:
    """Set the epsilon of a norm so that it has the same effect on fewer dimensions."""
    # The mean square over the kept dimensions is larger by this factor.
    norm.variance_epsilon = config.rms_norm_eps * config.dense_hidden_size / config.hidden_size


class _Sliced:
    """Mixin that replaces the blocks of a transformers model by sliced blocks."""

    block: ClassVar[Any]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # The next class in the MRO is the model of transformers.
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        decoder: Any = self.model  # type: ignore[attr-defined]
        for index in range(len(decoder.layers)):
            decoder.layers[index] = self.block(config, index)
        as_before(decoder.norm, config)


FAMILIES: tuple[tuple[Any, Any, Any], ...] = (
    (LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM),
    (MistralConfig, MistralDecoderLayer, MistralForCausalLM),
    (Qwen2Config, Qwen2DecoderLayer, Qwen2ForCausalLM),
    (Qwen3Config, Qwen3DecoderLayer, Qwen3ForCausalLM),
    (GraniteConfig, GraniteDecoderLayer, GraniteForCausalLM),
    (SmolLM3Config, SmolLM3DecoderLayer, SmolLM3ForCausalLM),
    (Phi3Config, Phi3DecoderLayer, Phi3ForCausalLM),
)


def _class_of(config: Any, layer: Any, model: Any) -> Any:
    """Return the model class of a family, with its configuration class ``config_class``."""
    config_class = type(
        f"Sliced{config.__name__}",
        (config,),
        {
            "__module__": __name__,
            "__annotations__": {"dense_hidden_size": int | None},
            "model_type": f"sliced-{config.model_type}",
            "dense_hidden_size": None,
            # The number of heads need not divide the hidden size.
            "validate_architecture": lambda self: None,
        },
    )
    name = f"Sliced{layer.__name__.removesuffix('DecoderLayer')}Block"
    members = {
        "__module__": __name__,
        "config_class": config_class,
        "block": type(name, (_SlicedBlock, layer), {"__module__": __name__}),
        "_no_split_modules": [name],
    }
    return type(f"Sliced{model.__name__}", (_Sliced, model), members)


CLASSES: tuple[Any, ...] = tuple(_class_of(*family) for family in FAMILIES)


def register() -> None:
    """Register the classes with transformers' Auto classes, and under their names here.

    transformers finds the classes of an export by name.
    """
    for model in CLASSES:
        globals()[model.__name__] = model
        globals()[model.config_class.__name__] = model.config_class
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


register()
