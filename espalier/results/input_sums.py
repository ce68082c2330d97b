"""Sums of squared inputs of a model's matrices, as a run of pooled pruning leaves them.

The file ``input-sums.safetensors`` has one float64 per input channel of every pruned matrix, under
the name of its weights. Its metadata have ``counts``, a JSON list of the number of tokens in the
sums of each block, or of clients if each counts equally, and ``sequence_length``, the number of
tokens of a calibration sample.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from espalier.errors import InputError
from espalier.hf.files.checkpoint import write_shard
from espalier.messages.tensor_blobs import TensorSpec
from espalier.methods.pruning.pooled_pruning import shared_inputs
from espalier.models.plan import ModelPlan
from espalier.results.finished_run import FinishedRun

FILE = "input-sums.safetensors"


@dataclass(frozen=True)
class InputSums:
    """Sums of squared inputs, (in_features,), float64, by name of the weights."""

    sums: Mapping[str, Tensor]
    counts: Mapping[str, int]
    """Number of tokens in the sums, or of clients if each counts equally, by name of weights."""
    sequence_length: int
    """Number of tokens of a calibration sample."""


def write_sums(
    folder: Path,
    plan: ModelPlan,
    sums_of: Callable[[int], Mapping[str, Tensor]],
    counts: Sequence[int],
    sequence_length: int,
) -> None:
    """Write the sums of a run, block by block.

    Parameters
    ----------
    folder : run directory
    plan : plan of the pruned model
    sums_of : function of a block's index that returns its sums by the first matrix of each input
    counts : number of tokens, or of clients that count equally, in the sums of each block
    sequence_length : number of tokens of a calibration sample
    """
    specs = {linear.parameter: TensorSpec("F64", (linear.shape[1],)) for linear in plan.linears}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for block in plan.blocks:
            sums = sums_of(block.index)
            # Matrices that read the same input, such as query and key, have the same sums.
            first = shared_inputs(block)
            for linear in block.linears:
                yield linear.parameter, sums[first[linear.name]]

    metadata = {"counts": json.dumps(list(counts)), "sequence_length": str(sequence_length)}
    write_shard(folder / FILE, specs, tensors(), metadata)


def read_sums(run: FinishedRun, plan: ModelPlan) -> InputSums:
    """Return the sums that a run of the model with this plan left.

    Raises InputError if the run left none, or the file is damaged.
    """
    path = run.path / FILE
    if not path.is_file():
        raise InputError(
            f"{run.path}: has no {FILE}; an importance matrix needs a run of pooled-pruning"
        )
    try:
        with safe_open(path, "pt") as file:
            counts = json.loads(file.metadata()["counts"])
            return InputSums(
                {name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
                {
                    linear.parameter: int(counts[block.index])
                    for block in plan.blocks
                    for linear in block.linears
                },
                int(file.metadata()["sequence_length"]),
            )
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); repeat the run") from None
