"""Names of a decoder's tensors as in transformers, and errors for missing or misshapen ones.

Files of a base model that was saved without its head lack the prefix of the base model in all
names. Files of a tied model may hold the tied matrix under the name of the embedding, of the head,
or both. If both are there and differ, the head is a matrix of its own, regardless of
``tie_word_embeddings``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError
from espalier.hf.families import Family
from espalier.hf.files.checkpoint import INDEX, Checkpoint

if TYPE_CHECKING:
    from espalier.hf.opening.opened import OpenedModel


T = TypeVar("T")


def with_base_prefix(family: Family, tensors: Mapping[str, T], directory: Path) -> dict[str, T]:
    """Return the tensors under the names of the model with its head, in the same order.

    Raises
    ------
    InputError
        Two tensors would get the same name.
    """
    prefix, _, _ = family.blocks.partition(".")
    parts = {
        path.split(".")[1]
        for path in (family.blocks, family.embeddings, family.final_norm)
        if "." in path
    }
    found: dict[str, T] = {}
    for name, tensor in tensors.items():
        full = f"{prefix}.{name}" if name.partition(".")[0] in parts else name
        if full != name and full in tensors:
            raise InputError(
                f"{directory}: its files contain both {name} and {full}, which are the same"
                " tensor; remove one of them"
            )
        found[full] = tensor
    return found


def head_and_embedding(family: Family) -> tuple[str, str]:
    """Return the names of the two matrices that may be tied."""
    return f"{family.head}.weight", f"{family.embeddings}.weight"


def under_embedding(family: Family, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a tied model with the head's matrix renamed to the embedding."""
    head, embedding = head_and_embedding(family)
    return {embedding if name == head else name: tensor for name, tensor in tensors.items()}


def has_other_head(family: Family, files: Checkpoint) -> bool:
    """Return whether the files hold an embedding and a head of other values, dtype or shape."""
    names = head_and_embedding(family)
    if not all(name in files.tensors for name in names):
        return False
    head, embedding = (files.tensors[name] for name in names)
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return True
    return any(one != other for one, other in zip(*map(files.chunks, names), strict=True))


TIED = "tie_word_embeddings"
BIAS_KEYS = ("attention_bias", "mlp_bias", "enable_bias")
"""Configuration keys that give matrices a bias."""


def missing_tensor(model: "OpenedModel", name: str) -> EspalierError:
    """Return the error for a tensor that is missing in the files, with the likely reason."""
    files = model.checkpoint.tensors
    head, embedding = head_and_embedding(model.family)
    where = f"{model.directory}: tensor {name} is missing"
    if name == head and embedding in files:
        return InputError(
            f"{where}, and config.json says that the head is not a copy of the embedding ({TIED}"
            f" is false), so transformers would initialise the head randomly; set {TIED} to true"
            " if both are one matrix, or name a model with a head"
        )
    if name == embedding and head in files:
        return InputError(
            f"{where}; the files contain {head}, which is also the embedding if config.json says"
            f" so: set {TIED} to true if both are one matrix"
        )
    if name.endswith(".bias") and any(model.config.get(key) for key in BIAS_KEYS):
        keys = " and ".join(key for key in BIAS_KEYS if model.config.get(key))
        return InputError(
            f"{where}, but config.json gives the model biases ({keys}); set the key to its value"
            " in training"
        )
    key = model.family.num_blocks_key
    if name.startswith(f"{model.family.blocks}.") and model.config.get(key) is None:
        count = model.configured(key)
        return InputError(
            f"{where}: config.json has no {key}, so transformers assumes {count}; set {key} to"
            " its value in training"
        )
    if (shard := _shard_in_index(model, name)) is not None:
        return InputError(
            f"{where}: according to {INDEX} it is in {shard}, but that file does not contain it;"
            f" copy {shard} again"
        )
    return InputError(
        f"{where}: {_what_is_there(model)}; name a model whose files and config.json belong"
        " together"
    )


def wrong_shape(model: "OpenedModel", name: str, wanted: tuple[int, ...]) -> EspalierError:
    """Return the error for a tensor whose shape differs from that of the configured model."""
    stored = model.checkpoint.tensors[name]
    return InputError(
        f"{model.directory}: {name} has shape {list(stored.shape)} in {stored.shard.name}, but"
        f" {list(wanted)} according to config.json; files and config.json belong to different"
        " models"
    )


def _shard_in_index(model: "OpenedModel", name: str) -> str | None:
    """Return the name of the file that holds a tensor according to the index.

    Returns None if the index does not name the tensor, or if there is no index.
    """
    if not model.checkpoint.is_sharded:
        return None
    try:
        named = read_json((model.directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return next((named[own] for own in model.family.file_names(name) if own in named), None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _what_is_there(model: "OpenedModel") -> str:
    names = sorted(model.checkpoint.tensors)
    return (
        f"its files contain {len(names)} tensors, such as {names[0]}"
        if names
        else "its files contain no tensor"
    )
