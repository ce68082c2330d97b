"""Rounding of summands: what a server decides from integer sums and from plain float replies.

    python -m benchmarks.accuracy.summand_errors [--model demo] [--clients 8] [--samples 8]

Clients have parts of Python's documentation. FLAP is also compared with means and spreads in
float32, as its clients sent them before they sent sums.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from client_app.summands.plain_blob import PlainBlob, ToSummands
from client_app.summands.statistics import of_input_sums, of_moments, of_scores
from espalier.data.client_text import client_samples
from espalier.hf.group_scores.flap import (
    BlockMoments,
    flap_cuts,
    moments_of_sums,
    pack_moments,
    watched_moments,
)
from espalier.hf.group_scores.taylor import pack_scores, taylor_cut, taylor_scores
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.sliced.signals import basis_of, mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.input_statistics import pack_statistics
from espalier.messages.blobs.cuts import read_cut
from espalier.messages.sums.secure_sum import summand_specs
from espalier.messages.sums.summands import Numbers, add_to, pack, unpack
from espalier.messages.tensor_blobs import views
from espalier.methods.pruning.flap import FlapSettings
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings, score_name, score_scale
from espalier.methods.pruning.pooled_pruning import COUNT
from espalier.methods.pruning.slicegpt import (
    MOMENTS,
    SliceGptSettings,
    dense_width,
    moment_scale,
    places,
)
from espalier.models.groups import Cut, Groups
from espalier.models.plan import block_key
from espalier.models.structure import ADDED_BIASES, GROUP_KINDS
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from pruning_kernels.groups.fluctuation import Moments, pooled
from pruning_kernels.groups.slicing import packed, unpacked
from pruning_kernels.wide_integers import from_wide

COMPUTING = Computing(torch.device("cpu"), torch.float32, 1)


def summed(
    run: RunSettings,
    model: OpenedModel,
    convert: ToSummands,
    key: str,
    blobs: Sequence[bytes],
    samples: int,
) -> dict[str, Numbers]:
    """Return the sum modulo 2^bits of the clients' summands of a blob, by tensor name."""
    specs = summand_specs(1, model.plan, run)[key]
    found = {}
    report = {"samples": samples}

    def plain(blob: bytes) -> PlainBlob:
        return PlainBlob(key, lambda: blob, report, model.plan, run)

    parts = [convert(plain(blob)) for blob in blobs]
    for name, spec in specs.items():
        total = np.zeros(spec.num_words, np.uint64)
        for own in parts:
            add_to(total, pack(own[name], spec), spec)
        found[name] = unpack(total, spec)
    return found


def flap_lines(model: OpenedModel, run: RunSettings, clients: Sequence[Tensor]) -> Iterator[str]:
    """Yield what differs in FLAP's groups and biases."""
    sent = [list(watched_moments(BlockStream(model, COMPUTING), samples)) for samples in clients]

    def float64(index: int) -> BlockMoments:
        return {name: pooled([own[index][name] for own in sent]) for name in ADDED_BIASES}

    def float32(index: int) -> BlockMoments:
        def rounded(own: Moments) -> Moments:
            return Moments(own.count, own.mean.float().double(), own.squares.float().double())

        return {name: pooled([rounded(own[index][name]) for own in sent]) for name in ADDED_BIASES}

    def fixed(index: int) -> BlockMoments:
        blobs = [pack_moments(own[index]) for own in sent]
        sums = summed(run, model, of_input_sums, block_key(index), blobs, 0)
        return moments_of_sums(int(sums[COUNT][0]), lambda name: from_wide(sums[name]))

    groups = Groups.of(model.plan)
    ways: dict[str, Callable[[int], BlockMoments]] = {
        "float64": float64, "float32": float32, "sums": fixed
    }  # fmt: skip
    blobs = {
        name: list(flap_cuts(model, moments, run.of(FlapSettings)))
        for name, moments in ways.items()
    }
    cuts = {name: read_cut(groups, own.__getitem__) for name, own in blobs.items()}
    blocks = range(len(model.plan.blocks))
    for name in ("float32", "sums"):
        variances = max(
            float((ways[name](i)[m].variance / float64(i)[m].variance - 1).abs().max())
            for i in blocks
            for m in ADDED_BIASES
        )
        biases = max(
            float(np.abs(values - views(other)[key]).max())
            for one, other in zip(blobs[name], blobs["float64"], strict=True)
            for key, values in views(one).items()
            if values.dtype == np.float32
        )
        yield (
            f"flap, {name}: variances differ by up to {variances:.1e} of themselves from float64,"
            f" {different(cuts[name], cuts['float64'])}, biases differ by up to {biases:.1e}"
        )


def different(one: Cut, other: Cut) -> str:
    """Return how many of the removed groups differ, in words."""
    return f"{int((one & ~other).sum())} of {int(other.sum())} groups differ"


def pruner_lines(model: OpenedModel, run: RunSettings, clients: Sequence[Tensor]) -> Iterator[str]:
    """Yield what differs in LLM-Pruner's scores and groups."""
    job = run.of(LlmPrunerSettings)
    number = run.data.num_samples
    sent = [taylor_scores(model, COMPUTING, samples, job, number) for samples in clients]
    blobs = [{index: pack_scores(own) for index, own in one.items()} for one in sent]
    scale = score_scale(run)
    floats: dict[int, dict[str, Tensor]] = {}
    fixed: dict[int, dict[str, Tensor]] = {}
    for index in sent[0]:
        key = block_key(index)
        specs = summand_specs(1, model.plan, run)[key]
        sums = summed(run, model, of_scores, key, [own[index] for own in blobs], 0)
        for kind in GROUP_KINDS:
            name = score_name(kind)
            own = [torch.tensor(views(blob[index])[name]).double() for blob in blobs]
            floats.setdefault(index, {})[kind] = torch.stack(own).sum(dim=0)
            fixed.setdefault(index, {})[kind] = scale.numbers(sums[name], specs[name].bits)
    both = [(floats[i][kind], fixed[i][kind]) for i in floats for kind in GROUP_KINDS]
    error = max(float((one - other).abs().max()) for one, other in both)
    sizes = torch.cat([one.abs() for one, _ in both])
    cuts = [taylor_cut(model, scores, job) for scores in (floats, fixed)]
    yield (
        f"llm-pruner, {job.element}: sums of magnitude {float(sizes.min()):.1e} to"
        f" {float(sizes.max()):.1e} (median {float(sizes.median()):.1e}) differ by up to"
        f" {error:.1e}; {different(*cuts)}"
    )


def slicegpt_lines(
    model: OpenedModel, run: RunSettings, clients: Sequence[Tensor]
) -> Iterator[str]:
    """Yield what differs in SliceGPT's mean moments and in the energy that bases keep."""
    walks = [mean_moments(BlockStream(model, COMPUTING), samples) for samples in clients]
    width = dense_width(model.plan)
    kept = run.of(SliceGptSettings).width(width)
    scale = moment_scale(model.plan, run)
    errors = []
    lost = []
    for place, *own in zip(places(model.plan), *walks, strict=True):
        blobs = [pack_statistics({MOMENTS: packed(moments)}) for moments in own]
        spec = summand_specs(1, model.plan, run)[place][MOMENTS]
        number = len(clients[0])
        sums = summed(run, model, of_moments, place, blobs, number)[MOMENTS]
        fixed = unpacked(scale.numbers(sums, spec.bits) / (number * len(clients)), width)
        floats = [torch.tensor(views(blob)[MOMENTS]).double() for blob in blobs]
        plain = unpacked(torch.stack(floats).mean(dim=0), width)
        errors.append(float((plain - fixed).abs().max()))
        bases = [basis_of(moments, kept)[0].double() for moments in (plain, fixed)]
        energies = [float(((plain @ basis) * basis).sum()) for basis in bases]
        lost.append(abs(energies[0] - energies[1]) / float(plain.trace()))
    yield (
        f"slicegpt: mean moments differ by up to {max(errors):.1e}; the bases keep the same share"
        f" of the signals up to {max(lost):.1e}"
    )


def main() -> None:
    """Print a line for each method and way."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.summand_errors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    model = open_model(given.model)
    common = {"num-clients": given.clients, "data.num-samples": given.samples}
    lines = {
        "flap": ({}, flap_lines),
        "llm-pruner": ({"llm-pruner.element": "signed"}, pruner_lines),
        "llm-pruner of magnitudes": ({}, pruner_lines),
        "slicegpt": ({}, slicegpt_lines),
    }
    for name, (settings, lines_of) in lines.items():
        run = parse({"method": name.split()[0], **common, **settings})
        read = partial(client_samples, run, simulated_node(), model.encode)
        for line in lines_of(model, run, [read(client) for client in range(given.clients)]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
