"""FLAP's running fluctuation against the variance over all tokens: effect on the removed groups.

    python -m benchmarks.accuracy.flap_variance [--model demo] [--num-samples 8 32]
    [--pruning-ratio 0.2]

The running figure is that of the published code, reimplemented here in a few lines. The inputs are
those of one client's calibration samples from Python's documentation.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from espalier.data.client_text import client_samples
from espalier.hf.group_scores.flap import flap_cuts
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.messages.blobs.cuts import read_cut
from espalier.methods.pruning.flap import FlapSettings
from espalier.models.groups import Cut, Groups
from espalier.models.structure import ADDED_BIASES
from espalier.settings.node import simulated_node
from espalier.settings.run import parse
from pruning_kernels.groups.fluctuation import Moments, moments_of

Figure = Callable[[Tensor], Moments]
"""Return the moments of inputs, shape (samples, tokens, channels)."""


def running_figure(inputs: Tensor) -> Tensor:
    """Return the fluctuation as the published code accumulates it, sample by sample.

    Parameters
    ----------
    inputs : (samples, tokens, channels), float64

    Returns
    -------
    Tensor
        (channels,), a sum over the tokens of a sample
    """
    mean = figure = torch.zeros(inputs.shape[-1], dtype=torch.float64)
    for number, sample in enumerate(inputs, start=1):
        mean = mean * ((number - 1) / number) + sample.mean(dim=0) / number
        if number > 1:
            figure = (
                figure * ((number - 2) / (number - 1))
                + (sample - mean).square().sum(dim=0) / number
            )
    return figure


def running_moments(inputs: Tensor) -> Moments:
    """Return moments whose variance is the running figure per token."""
    samples, tokens, _ = inputs.shape
    count = samples * tokens
    return Moments(count, inputs.mean(dim=(0, 1)), running_figure(inputs) / tokens * (count - 1))


FIGURES: Mapping[str, Figure] = {
    "all tokens": lambda inputs: moments_of(inputs.flatten(0, 1)),
    "running": running_moments,
    "running, reversed": lambda inputs: running_moments(inputs.flip(0)),
}


@torch.no_grad()
def watched_inputs(model: OpenedModel, samples: Tensor) -> list[dict[str, Tensor]]:
    """Return the inputs of both matrices of each block, (samples, tokens, channels), float64."""
    stream = BlockStream(model, Computing(torch.device("cpu"), torch.float32, 1))
    activations = stream.start(samples)
    found = []
    for block_plan in model.plan.blocks:
        seen: dict[str, list[Tensor]] = {name: [] for name in ADDED_BIASES}
        with stream.block(block_plan.index) as block:
            linears = stream.linears(block_plan.index, block)
            hooks = [
                linears[name].register_forward_pre_hook(
                    lambda _, inputs, own=own: own.append(inputs[0].double())
                )
                for name, own in seen.items()
            ]
            activations.through(block_plan.index, block)
            for hook in hooks:
                hook.remove()
        found.append({name: torch.cat(own) for name, own in seen.items()})
    return found


def removed_groups(
    model: OpenedModel, inputs: Sequence[Mapping[str, Tensor]], job: FlapSettings, figure: Figure
) -> Cut:
    """Return the removed groups."""
    blobs = flap_cuts(
        model, lambda index: {name: figure(value) for name, value in inputs[index].items()}, job
    )
    return read_cut(Groups.of(model.plan), list(blobs).__getitem__)


def main() -> None:
    """Print a line for each number of samples."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.flap_variance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-samples", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--pruning-ratio", type=float, default=0.2)
    given = parser.parse_args()
    model = open_model(given.model)
    run = parse(
        {
            "method": "flap",
            "pruning.ratio": given.pruning_ratio,
            "data.num-samples": max(given.num_samples),
            "num-clients": 8,
        }
    )
    inputs = watched_inputs(model, client_samples(run, simulated_node(), model.encode, 0))
    for number in given.num_samples:
        first = [{name: value[:number] for name, value in own.items()} for own in inputs]
        cuts = {
            name: removed_groups(model, first, run.of(FlapSettings), figure)
            for name, figure in FIGURES.items()
        }
        ours, running, reverse = (cuts[name] for name in FIGURES)
        print(
            f"{number} samples: {ours.sum()} groups go; {(running & ~ours).sum()} others by the"
            f" running figure, and {(reverse & ~running).sum()} others than those in reverse order"
        )


if __name__ == "__main__":
    main()
