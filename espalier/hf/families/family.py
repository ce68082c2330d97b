"""What a model family tells about itself: names, never code. A new family is one file with one ``Family`` in it.

To add one: name its ``model_type`` values, the path of its block list, and for each linear and norm of a block the canonical
name and the module's own; list it in ``families/__init__.py``; add a test class with a tiny random configuration. An encoder
also names the path of its base model and the linears of its classification head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from espalier.settings.lora import CANONICAL_LINEARS

CANONICAL_HEAD = ("head.dense", "head.out")
"""Canonical names of the linears of a classification head, in the order in which it uses them."""

CANONICAL_NORMS = ("norm.attn", "norm.q", "norm.k", "norm.mlp")
"""Canonical names of a block's norms: of attention and of the feed-forward part, before or behind it as the family has it, and
of query and key heads."""
FINAL_NORM = "norm.final"
"""Canonical name of the norm behind the last block."""

OLD_NORM_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Ends of tensor names, and what files of the first BERT models have in their place."""


@dataclass(frozen=True)
class Family:
    """Named accessors of a family of transformer models."""

    name: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in ``config.json``."""
    kind: Literal["decoder", "encoder"]
    """Decoders are language models with their own head; encoders are tuned with a classification head made for the task."""
    blocks: str
    """Path of the module list of blocks, from the model with its head."""
    linears: Mapping[str, str]
    """Canonical name of each prunable linear -> its path within a block, in the order in which the block uses them."""
    num_blocks_key: str = "num_hidden_layers"
    """Configuration key that holds the number of blocks."""
    query_heads_key: str = "num_attention_heads"
    kv_heads_key: str = "num_key_value_heads"
    """Configuration keys of the attention groups.

    The second is empty in a family that has as many groups as heads.
    """
    channels_key: str = "intermediate_size"
    """Configuration key of the width of the feed-forward part."""
    embeddings: str = "model.embed_tokens"
    head: str = "lm_head"
    base: str = ""
    """Path of the encoder in a model with a head; files of the encoder alone leave it out of their tensors' names."""
    first_position_after_padding: bool = False
    """Positions are counted from behind the padding token's number; so a model has fewer than its configuration says."""
    head_linears: Mapping[str, str] = field(default_factory=dict)
    """Canonical name of each linear of the classification head -> its path in the model; none in a decoder."""
    norms: Mapping[str, str] = field(default_factory=dict)
    """Canonical name of each norm of a block -> its path within a block."""
    has_lanes: bool = False
    """Whether attention and feed-forward part are modules with a norm before each, behind which residual lanes can be cut."""
    final_norm: str = ""
    """Path of the norm behind the last block; empty in a family that has none."""

    def __post_init__(self) -> None:
        unknown = set(self.linears) - set(CANONICAL_LINEARS) | set(self.head_linears) - set(
            CANONICAL_HEAD
        )
        unknown |= set(self.norms) - set(CANONICAL_NORMS)
        if unknown:
            raise ValueError(
                f"family {self.name}: {', '.join(sorted(unknown))} is no canonical name"
            )
        if (self.kind == "encoder") != bool(self.base and self.head_linears):
            raise ValueError(
                f"family {self.name}: an encoder names its base and the linears of its head, a"
                " decoder does not"
            )

    @property
    def auto_class(self) -> str:
        """Class of transformers that builds a whole model of the family from its configuration."""
        return (
            "AutoModelForCausalLM"
            if self.kind == "decoder"
            else "AutoModelForSequenceClassification"
        )

    def file_names(self, name: str) -> Iterator[str]:
        """Names that the model's tensor ``name`` may have in files, the likeliest first."""
        names = [name]
        if self.base:
            names += [name.removeprefix(f"{self.base}.")]
            names += [_old_name(known) for known in names]
        yield from dict.fromkeys(names)

    def parameter_path(self, name: str, index: int | None) -> str | None:
        """Path of a parameter in the model by its canonical name; None if the family has none of that name.

        ``attn.q.bias`` and ``norm.mlp.weight`` are of the block ``index``, ``norm.final.weight`` and ``head.out.bias`` of none.
        """
        of, _, kind = name.rpartition(".")
        if index is not None:
            path = {**self.linears, **self.norms}.get(of)
            return f"{self.blocks}.{index}.{path}.{kind}" if path else None
        path = {**self.head_linears, FINAL_NORM: self.final_norm}.get(of)
        return f"{path}.{kind}" if path else None


def _old_name(name: str) -> str:
    for new, old in OLD_NORM_NAMES.items():
        if name.endswith(new):
            return name.removesuffix(new) + old
    return name
