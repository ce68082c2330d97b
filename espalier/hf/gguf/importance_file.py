"""Importance matrix of llama.cpp: sums of squared inputs by which ``llama-quantize`` rounds."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from espalier.hf.gguf.architecture import architecture_of
from espalier.hf.gguf.model_file import names_of, new_writer, write_file
from espalier.hf.gguf.tensors import announce, place_of
from espalier.hf.opening.opened_model import OpenedModel

DTYPE = "float32"


def write_importance(
    model: OpenedModel,
    sums: Mapping[str, Tensor],
    counts: Mapping[str, int],
    chunk_size: int,
    target: Path,
    datasets: list[str],
) -> str:
    """Write sums of squared inputs as llama.cpp's ``imatrix`` file; return the architecture.

    Every matrix has ``in_sum2``, (in_features,), and ``counts``, (1,), float32, under the name that
    it has in the model's GGUF file. llama.cpp divides the sums by the count. The order of input
    channels is that of transformers, because only rows of query and key are reordered. Raises
    InputError if llama.cpp has no architecture for the model, or the library ``gguf`` is not
    installed.

    Parameters
    ----------
    model : the model that is quantised
    sums : sums of squared inputs by name of the weights
    counts : number of tokens in the sums, or of means that were added, by name of the weights
    chunk_size : number of tokens of a calibration sample
    target : path of the file
    datasets : names of the calibration data, in words
    """
    architecture = architecture_of(model)
    writer = new_writer(target, architecture)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", datasets)
    writer.add_uint32("imatrix.chunk_count", max(1, max(counts.values()) // chunk_size))
    writer.add_uint32("imatrix.chunk_size", chunk_size)
    names = names_of(architecture)
    # Matrices with the same input have equal sums, under names of their own.
    places = {place_of(architecture, names, name).name: name for name in sums}

    def entries() -> Iterator[tuple[str, Tensor, str]]:
        for place, name in places.items():
            yield f"{place}.in_sum2", sums[name].to(torch.float32), DTYPE
            yield f"{place}.counts", torch.tensor([float(counts[name])]), DTYPE

    for name, value, dtype in entries():
        # The generator runs twice: for the header, and for the data.
        announce(writer, name, tuple(value.shape), dtype)
    write_file(writer, entries())
    return architecture.name
