"""Export of a model whose block linears are in NF4.

Plain ``AutoModelForCausalLM.from_pretrained(folder)`` loads the result, and so does
``OpenedModel``. The files have the layout of transformers and bitsandbytes (``checkpoint``).
Embeddings, norms, biases and the head are copied unchanged.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.errors import InputError
from espalier.hf.export.model import replacing_folder
from espalier.hf.files.checkpoint import SINGLE, STORED_DTYPES, write_shard
from espalier.hf.files.tensor_pieces import pieces
from espalier.hf.nf4.checkpoint import (
    CONFIG_KEY,
    STATE,
    STATE_BYTES,
    stored_in_nf4,
    stored_parts,
)
from espalier.hf.nf4.matrices import Nf4Matrix, quantise, require_quantisable, state_of, tables
from espalier.hf.opening.model_files import copy_other_files
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.configuration import plain_config
from espalier.hf.structured.export import REWRITTEN
from espalier.messages.tensor_blobs import TensorSpec
from espalier.models.plan import LinearPlan
from espalier.progress import report_each
from espalier.storage.atomic import write_json

CPU = torch.device("cpu")


def write_quantised(model: OpenedModel, target: Path, double_quantisation: bool = True) -> None:
    """Write a decoder whose block linears are in NF4; the same model gives the same bytes.

    The directory is written atomically: it appears complete or not at all. Matrices are read in
    pieces, and are quantised and written one at a time. Matrices that the model's files hold in NF4
    with the same double quantisation are copied unchanged. Raises InputError if a matrix has rows
    that are not a whole number of blocks of 64, the shapes of a pruned model cannot be expressed in
    a plain transformers configuration, the model is an encoder, bitsandbytes is not installed, or
    writing failed.

    Parameters
    ----------
    model : model to write; after whole blocks were dropped, the remaining blocks are renumbered
    target : directory to write; an existing one is replaced
    double_quantisation : see ``quantise``
    """
    require_quantisable(model.plan)
    config = quantised_config(model, double_quantisation)
    dtype = getattr(torch, _compute_dtype(model))
    with replacing_folder(target) as unfinished:
        write_shard(
            unfinished / SINGLE,
            quantised_specs(model, double_quantisation),
            _tensors(model, double_quantisation, dtype),
        )
        copy_other_files(model.directory, unfinished, REWRITTEN)
        write_json(unfinished / "config.json", config)


def quantised_config(model: OpenedModel, double_quantisation: bool = True) -> dict[str, Any]:
    """Return ``config.json`` of the model in NF4."""
    # These are the keys that transformers writes.
    quantisation = {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": _compute_dtype(model),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quantisation,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": _other_linears(model),
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
    config: dict[str, Any] | None = model.config
    if model.structure is not None:
        config = plain_config(model.config, model.family, model.plan, model.structure)
    # Biases of zeros would have to be written along with added ones.
    if config is None or (model.cut is not None and model.cut.added_biases):
        raise InputError(
            f"{model.directory}: the smaller model cannot be written in NF4, because its blocks"
            " differ, or transformers cannot describe their shape; drop only whole blocks"
        )
    return config | {CONFIG_KEY: quantisation}


def _compute_dtype(model: OpenedModel) -> str:
    """Return the name of the torch dtype of the hidden states and of all weights outside NF4."""
    dtype = str(model.configured("dtype")).removeprefix("torch.")
    if dtype in STORED_DTYPES:
        return dtype
    # A configuration that names no dtype: that of the files.
    stored = model.plan.blocks[0].linears[0].dtype
    return next((name for name, code in STORED_DTYPES.items() if code == stored), "float32")


def _other_linears(model: OpenedModel) -> list[str]:
    """Return the module paths of the linears that are not quantised.

    These are the head and, in OPT, the projections of the embeddings.
    """
    quantised = {
        model.family.module_path(block.index, linear.name)
        for block in model.plan.blocks
        for linear in block.linears
    }
    modules = model.new_skeleton().named_modules()
    return [
        path for path, module in modules if isinstance(module, nn.Linear) and path not in quantised
    ]


def quantised_specs(model: OpenedModel, double_quantisation: bool = True) -> dict[str, TensorSpec]:
    """Return the tensors of the file, sorted by name.

    The result does not depend on how the model's own files are sharded.
    """
    linears = _linears(model)
    specs = dict[str, TensorSpec]()
    for name, stored in sorted(model.checkpoint.tensors.items()):
        if name not in linears:
            specs[name] = stored
            continue
        shape = linears[name].shape
        specs[name] = TensorSpec("U8", (shape[0] * shape[1] // 2, 1))
        for part, spec in stored_parts(shape, double_quantisation).items():
            specs[f"{name}.{part}"] = spec
        specs[f"{name}.{STATE}"] = TensorSpec("U8", (STATE_BYTES,))
    return specs


def _tensors(
    model: OpenedModel, double_quantisation: bool, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``quantised_specs`` in the same order, on the CPU."""
    linears = _linears(model)
    lookup = tables(CPU)
    for name in report_each(sorted(model.checkpoint.tensors), "writing tensor"):
        if name not in linears:
            yield name, model.checkpoint.read(name)
            continue
        matrix = _quantised(model, linears[name], double_quantisation)
        lookups = state_of(matrix, lookup, dtype).as_dict(packed=True)
        yield name, matrix.packed
        for part in stored_parts(matrix.shape, double_quantisation):
            yield f"{name}.{part}", lookups[part]
        # The header needs the size of the state before the first matrix is quantised.
        state = bytes(lookups[STATE].tolist())
        yield (
            f"{name}.{STATE}",
            torch.frombuffer(bytearray(state.ljust(STATE_BYTES)), dtype=torch.uint8),
        )


def _linears(model: OpenedModel) -> dict[str, LinearPlan]:
    return {linear.parameter: linear for linear in model.plan.linears}


def _quantised(model: OpenedModel, linear: LinearPlan, double_quantisation: bool) -> Nf4Matrix:
    stored = stored_in_nf4(model.checkpoint, linear.parameter)
    # Quantising dequantised weights again could change the bits, so existing codes are reused.
    if stored is not None and stored[0].double_quantisation == double_quantisation:
        return stored[0].matrix(stored[1], CPU)
    return quantise(
        pieces(model.checkpoint, linear.parameter), linear.shape, CPU, double_quantisation
    )
