"""GGUF file of a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.hf.export.model import weight_reader
from espalier.hf.gguf.architecture import Architecture, architecture_of
from espalier.hf.gguf.library import require_gguf
from espalier.hf.gguf.tensors import (
    OF_FILES,
    announce,
    format_of,
    in_format,
    place_of,
    reordered,
    rope_factors,
)
from espalier.hf.gguf.vocabulary import add_vocabulary
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import Edits
from espalier.progress import report_each


@torch.no_grad()
def write_model(model: OpenedModel, edits: Edits, target: Path, name: str, dtype: str = "") -> str:
    """Write a GGUF file of a model with edited weights, and return its architecture.

    Tensors are read, edited and written one at a time. Vectors are float32. Raises InputError if
    llama.cpp has no architecture or tokenizer that computes what the model does, or a value is too
    large for float16.

    Parameters
    ----------
    model : the model, also a pruned one
    edits : changes to its weights
    target : path of the file
    name : name of the model in the file
    dtype : ``float32``, ``float16`` or ``bfloat16``; empty for that of the model's files
    """
    architecture = architecture_of(model)
    writer = new_writer(target, architecture)
    writer.add_name(name)
    architecture.describe(writer)
    add_vocabulary(writer, model)
    dtype = dtype or dtype_of(model)
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    kinds = {
        "float32": LlamaFileType.ALL_F32,
        "float16": LlamaFileType.MOSTLY_F16,
        "bfloat16": LlamaFileType.MOSTLY_BF16,
    }
    writer.add_file_type(kinds[dtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    # Factors of the rotary embedding are tensors in GGUF.
    extra = dict(rope_factors(architecture))
    for key, value in extra.items():
        announce(writer, key, tuple(value.shape), "float32")
    stored = model.checkpoint.as_written.tensors
    names = names_of(architecture)
    places = {parameter: place_of(architecture, names, parameter) for parameter in stored}
    for parameter, place in places.items():
        shape = stored[parameter].shape
        # Announced in the order in which the tensors are written.
        announce(writer, place.name, shape, format_of(shape, dtype))

    def values() -> Iterator[tuple[str, Tensor, str]]:
        yield from ((key, value, "float32") for key, value in extra.items())
        read = weight_reader(model, edits)
        for parameter, place in report_each(list(places.items()), "writing tensor"):
            # Reordered after the edit, which knows transformers' order.
            value = reordered(read(parameter), place.heads)
            yield parameter, value, format_of(tuple(value.shape), dtype)

    write_file(writer, values())
    return architecture.name


def new_writer(target: Path, architecture: Architecture) -> Any:
    """Return a writer of a GGUF file, whose general keys are not written yet.

    Raises InputError if the library ``gguf`` is not installed.
    """
    require_gguf()
    from gguf import GGUFWriter

    return GGUFWriter(target, architecture.name)


def names_of(architecture: Architecture) -> Any:
    """Return the names of tensors of an architecture, as the library ``gguf`` knows them."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    return get_tensor_name_map(MODEL_ARCH[architecture.name.upper()], len(architecture.sizes))


def dtype_of(model: OpenedModel) -> str:
    """Return the number format of the matrices in a model's files."""
    first = model.plan.blocks[0].linears[0].parameter
    return OF_FILES[model.checkpoint.as_written.tensors[first].dtype]


def write_file(writer: Any, values: Iterator[tuple[str, Tensor, str]]) -> None:
    """Write keys and tensors to a file: name, values and format of each announced tensor."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, value, dtype in values:
        writer.write_tensor_data(in_format(value, name, dtype))
    writer.close()
