"""What a model family tells about itself: names, never code. A new family is one file with one ``Family`` in it.

To add one: name its ``model_type`` values, the path of its block list, and for each linear of a block the canonical name
and the module's own; list it in ``families/__init__.py``; add a test class with a tiny random configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from espalier.settings.mistakes import Mistake

CANONICAL_LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
"""Canonical names of a block's linears; a family without a gate has no ``mlp.gate``."""


@dataclass(frozen=True)
class Family:
    """Named accessors of a family of transformer models."""

    name: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in ``config.json``."""
    kind: str
    """``decoder`` or ``encoder``."""
    blocks: str
    """Path of the module list of blocks, from the model with its head."""
    linears: Mapping[str, str]
    """Canonical name of each prunable linear -> its path within a block, in the order in which the block uses them."""
    num_blocks_key: str = "num_hidden_layers"
    """Configuration key that holds the number of blocks."""
    query_heads_key: str = "num_attention_heads"
    kv_heads_key: str = "num_key_value_heads"
    """Configuration keys of the attention groups; a missing ``kv_heads_key`` means one group per query head."""
    embeddings: str = "model.embed_tokens"
    head: str = "lm_head"

    def __post_init__(self) -> None:
        unknown = set(self.linears) - set(CANONICAL_LINEARS)
        if unknown:
            raise ValueError(f"family {self.name}: {', '.join(sorted(unknown))} is no canonical linear name")

    def kv_groups(self, config: Mapping[str, object]) -> tuple[int, int]:
        """Number of key-value groups, and of query heads in each."""
        heads = _positive(config, self.query_heads_key, None)
        groups = _positive(config, self.kv_heads_key, heads)
        return groups, heads // groups


def _positive(config: Mapping[str, object], key: str, default: int | None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise Mistake(f"config.json: {key} = {value!r} must be a positive integer")
    return value
