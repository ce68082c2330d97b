"""Names of a decoder's tensors, as transformers names the parameters of the model with its head.

Files of a base model that was saved without its head lack the prefix of the base model in all
names. Files of a tied model may hold the tied matrix under the name of the embedding, of the head,
or both. If both are there and differ, the head is a matrix of its own, regardless of
``tie_word_embeddings``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from espalier.errors import InputError
from espalier.hf.families import Family
from espalier.hf.files.checkpoint import Checkpoint

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
