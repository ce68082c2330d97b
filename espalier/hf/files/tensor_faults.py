"""Error messages for tensors that are missing or do not have the configured shape."""

from typing import TYPE_CHECKING

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError
from espalier.hf.files.checkpoint import INDEX
from espalier.hf.files.tensor_names import head_and_embedding

if TYPE_CHECKING:
    from espalier.hf.opening.opened import OpenedModel

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
