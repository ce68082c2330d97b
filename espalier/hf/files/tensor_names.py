"""Names of a decoder's tensors as in transformers, and errors for missing or misshapen ones.

Files of a base model that was saved without its head lack the prefix of the base model in all
names. Files of a tied model may hold the tied matrix under the name of the embedding, of the head,
or both. If both are there and differ, the head is a matrix of its own, regardless of
``tie_word_embeddings``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.errors import EspalierError, InputError
from espalier.hf.families import Family
from espalier.hf.files.checkpoint import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from espalier.hf.opening.opened_model import OpenedModel

TIED = "tie_word_embeddings"
BIAS_KEYS = ("attention_bias", "mlp_bias", "enable_bias")
"""Configuration keys that give matrices a bias."""


def with_base_prefix(
    family: Family, tensors: Mapping[str, StoredTensor], directory: Path
) -> dict[str, StoredTensor]:
    """Return the tensors under the names of the model with its head, in the same order.

    Raises InputError if two tensors would get the same name.
    """
    prefix, _, _ = family.blocks.partition(".")
    # First parts of names below the prefix, by which names without it are recognised.
    parts = {
        path.split(".")[1]
        for path in (family.blocks, family.embeddings, family.final_norm)
        if "." in path
    }
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        full = f"{prefix}.{name}" if name.partition(".")[0] in parts else name
        if full != name and full in tensors:
            raise InputError(
                f"{directory}: its files contain both {name} and {full}, which are the same"
                " tensor; remove one of them"
            )
        renamed[full] = tensor
    return renamed


def has_other_head(family: Family, files: Checkpoint) -> bool:
    """Return whether head and embedding, both in the files, differ in values, dtype or shape."""
    names = (family.head_weight, family.embedding_weight)
    head, embedding = (files.tensors[name] for name in names)
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return True
    # Chunk by chunk, because embeddings are large.
    return any(
        head_chunk != embedding_chunk
        for head_chunk, embedding_chunk in zip(*map(files.chunks, names), strict=True)
    )


def missing_tensor(model: "OpenedModel", name: str) -> EspalierError:
    """Return the error for a tensor that is missing in the files, with the likely reason."""
    files = model.checkpoint.tensors
    family = model.family
    tied = {
        family.head_weight: family.embedding_weight,
        family.embedding_weight: family.head_weight,
    }
    if (tied_name := tied.get(name)) in files:
        reason = (
            f"the files contain {tied_name}, and config.json does not say that both are one matrix;"
            f" set {TIED} to true if they are, or name a model that has both"
        )
    elif name.endswith(".bias") and (keys := [key for key in BIAS_KEYS if model.config.get(key)]):
        reason = (
            f"config.json gives the model biases ({' and '.join(keys)}); set the key to its value"
            " in training"
        )
    elif name.startswith(f"{family.blocks}.") and model.config.get(family.num_blocks_key) is None:
        reason = (
            f"config.json has no {family.num_blocks_key}, so transformers assumes"
            f" {model.configured(family.num_blocks_key)}; set it to its value in training"
        )
    else:
        reason = (
            f"its files contain {len(files)} tensors, such as {min(files, default='none')}; copy"
            " them again, or name a model whose files and config.json belong together"
        )
    return InputError(f"{model.directory}: tensor {name} is missing: {reason}")


def wrong_shape(model: "OpenedModel", name: str, wanted: tuple[int, ...]) -> EspalierError:
    """Return the error for a tensor whose shape differs from that of the configured model."""
    stored = model.checkpoint.tensors[name]
    return InputError(
        f"{model.directory}: {name} has shape {list(stored.shape)} in {stored.shard.name}, but"
        f" {list(wanted)} according to config.json; files and config.json belong to different"
        " models"
    )
