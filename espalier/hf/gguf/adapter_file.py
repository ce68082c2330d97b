"""GGUF file of a LoRA adapter, which llama.cpp applies to the GGUF file of the base model."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from espalier.hf.export.peft_files import Adapted
from espalier.hf.gguf.architecture import architecture_of
from espalier.hf.gguf.model_file import names_of, new_writer, write_file
from espalier.hf.gguf.tensors import Place, announce, place_of, reordered
from espalier.hf.opening.opened_model import OpenedModel

DTYPE = "float32"


def write_adapter(model: OpenedModel, adapted: Adapted, target: Path, name: str) -> str:
    """Write a LoRA adapter in float32, and return the architecture of its base model.

    Raises InputError if llama.cpp has no architecture that computes what the base model does.

    Parameters
    ----------
    model : the base model
    adapted : factors of the adapter
    target : path of the file
    name : name of the adapter in the file
    """
    from gguf import GGUFType

    architecture = architecture_of(model)
    writer = new_writer(target, architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string("adapter.type", "lora")
    names = names_of(architecture)
    entries = []
    for index, block_factors in sorted(adapted.items()):
        for linear, factors in block_factors.items():
            parameter = model.plan.blocks[index].linear(linear).parameter
            place = place_of(architecture, names, parameter)
            entries.append((place, factors))
    # llama.cpp divides this number by the rank.
    alpha = entries[0][1].scaling * entries[0][1].a.shape[0]
    writer.add_float32("adapter.lora.alpha", float(alpha))
    # All tensors are announced before the first is written: the header has their shapes.
    for place, factors in entries:
        for key, value in _sides(place, factors.a, factors.b):
            announce(writer, key, tuple(value.shape), DTYPE)

    def values() -> Iterator[tuple[str, Tensor, str]]:
        for place, factors in entries:
            for key, value in _sides(place, factors.a, factors.b):
                yield key, value, DTYPE

    write_file(writer, values())
    return architecture.name


def _sides(place: Place, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield both matrices of one adapter; the rows of an update are those of ``b``."""
    yield f"{place.name}.lora_a", a
    # Rows of query and key are reordered with those of the base.
    yield f"{place.name}.lora_b", reordered(b, place.heads)
