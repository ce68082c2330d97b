"""Description of a model family: names only, no code.

A ``Family`` has the ``model_type`` values, the path of the block list, and the module path of each
linear and norm of a block by canonical name. An encoder also needs the path of its base model and
the linears of its classification head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from espalier.settings.tables.lora import CANONICAL_LINEARS

CANONICAL_HEAD = ("head.dense", "head.out")
"""Canonical names of the linears of a classification head, in order of use."""

CANONICAL_NORMS = (
    "norm.attn", "norm.attn.after", "norm.q", "norm.k", "norm.mlp", "norm.mlp.after",
)  # fmt: skip
"""Canonical names of a block's norms: attention, query heads, key heads, feed-forward part.

``norm.attn`` and ``norm.mlp`` come before or after attention and feed-forward part, depending on
the family; a family with norms in both places names the second ``after``.
"""
FINAL_NORM = "norm.final"
"""Canonical name of the norm after the last block."""

OLD_NORM_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Suffixes of tensor names, and their old form in files of the first BERT models."""


@dataclass(frozen=True)
class Family:
    """Named accessors of a family of transformer models."""

    name: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in ``config.json``."""
    kind: Literal["decoder", "encoder"]
    """Kind of model.

    Decoders are language models with their own head. Encoders are tuned with a classification head
    that is created for the task.
    """
    blocks: str
    """Path of the module list of blocks, relative to the model with its head."""
    linears: Mapping[str, str]
    """Path within a block of each prunable linear by canonical name, in order of use."""
    num_blocks_key: str = "num_hidden_layers"
    """Configuration key of the number of blocks."""
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
    """Path of the encoder in a model with a head.

    Files of a bare encoder omit it in the names of their tensors.
    """
    first_position_after_padding: bool = False
    """True if positions start after the id of the padding token.

    The model then has fewer positions than its configuration says.
    """
    head_linears: Mapping[str, str] = field(default_factory=dict)
    """Path of each linear of the classification head by canonical name; empty for a decoder."""
    norms: Mapping[str, str] = field(default_factory=dict)
    """Path within a block of each norm by canonical name."""
    residual_prunable: bool = False
    """True if residual dimensions can be removed.

    For this, attention and feed-forward part must be modules with a norm before each of them.
    """
    heads_prunable: bool = True
    """False if heads cannot be removed, because a norm averages over all of them."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors of a block whose names in files differ from those in transformers; empty if dense.

    Keys are paths within a block in transformers, and values are those in files, with ``{}`` for
    the number of an expert. Only attention of such a family has canonical names.
    """
    block_keys: tuple[str, ...] = ()
    """Configuration keys of lists that transformers derives from the blocks' numbers.

    A file may lack them.
    """
    final_norm: str = ""
    """Path of the norm after the last block; empty if the family has none."""
    packs: bool = True
    """True if the model separates packed records by their positions (``task.packing``)."""

    def __post_init__(self) -> None:
        unknown = set(self.linears) - set(CANONICAL_LINEARS) | set(self.head_linears) - set(
            CANONICAL_HEAD
        )
        unknown |= set(self.norms) - set(CANONICAL_NORMS)
        if unknown:
            raise ValueError(
                f"family {self.name}: {', '.join(sorted(unknown))} is not a canonical name"
            )
        if (self.kind == "encoder") != bool(self.base and self.head_linears):
            raise ValueError(
                f"family {self.name}: an encoder names its base and the linear layers of its"
                " head; a decoder does not"
            )

    @property
    def auto_class(self) -> str:
        """Class of transformers that builds a whole model of the family from its configuration."""
        return (
            "AutoModelForCausalLM"
            if self.kind == "decoder"
            else "AutoModelForSequenceClassification"
        )

    @property
    def head_weight(self) -> str:
        """Name of the head's matrix, which may be tied to the embedding."""
        return f"{self.head}.weight"

    @property
    def embedding_weight(self) -> str:
        """Name of the embedding's matrix."""
        return f"{self.embeddings}.weight"

    def module_path(self, index: int, linear: str) -> str:
        """Return the path of a block's matrix in the model, by canonical name."""
        return f"{self.blocks}.{index}.{self.linears[linear]}"

    def file_names(self, name: str) -> Iterator[str]:
        """Yield the names that a model's tensor may have in files, the most likely first."""
        names = [name]
        if self.base:
            # Files of a bare encoder lack its prefix.
            names += [name.removeprefix(f"{self.base}.")]
            for candidate in tuple(names):
                for new, old in OLD_NORM_NAMES.items():
                    # Old BERT files have other names of norms.
                    if candidate.endswith(new):
                        names.append(candidate.removesuffix(new) + old)
        yield from dict.fromkeys(names)

    def block_of(self, name: str) -> tuple[str, int, str] | None:
        """Split the name of a block's tensor in files; None for other tensors.

        Returns
        -------
        tuple
            Prefix before the index of the block, the index, and the path within the block
        """
        for prefix in self.file_names(f"{self.blocks}."):
            number, dot, path = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and dot and number.isdecimal():
                return prefix, int(number), path
        return None

    def parameter_path(self, name: str, index: int | None) -> str | None:
        """Return the path of a parameter by canonical name; None if the family has no such name.

        Parameters
        ----------
        name : canonical name, such as ``attn.q.bias``, ``norm.mlp.weight``, ``norm.final.weight``
            or ``head.out.bias``
        index : index of the block for a parameter of a block; otherwise None
        """
        module, _, kind = name.rpartition(".")
        if index is not None:
            path = {**self.linears, **self.norms}.get(module)
            return f"{self.blocks}.{index}.{path}.{kind}" if path else None
        path = {**self.head_linears, FINAL_NORM: self.final_norm}.get(module)
        return f"{path}.{kind}" if path else None
