"""Tensors that clients train, by round, and the blobs and parts in which they travel."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from espalier.messages.tensor_blobs import TensorSpec, wire_specs
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.models.adapters import FACTORS, AdapterPlan, adapter_plan
from espalier.models.plan import ModelPlan, cut_into_parts
from espalier.settings.run import RunSettings

Trained = Callable[[ModelPlan, RunSettings, int], AdapterPlan]
"""Function that returns the tensors that a method trains, given a rank limit."""


def trained(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """Return the tensors that the run trains, or those of a client with this rank limit."""
    job = run.of(AdapterAveraging)
    lora = job.lora_of(run.lora, len(plan.blocks))
    adapters = replace(
        adapter_plan(plan, lora, run.num_classes), factors=job.sent_factors, bases=job.bases
    )
    return adapters if rank_limit is None else adapters.limited(rank_limit)


def of_round(adapters: AdapterPlan, run: RunSettings, server_round: int) -> AdapterPlan:
    """Return these adapters with the factors that clients train and send in a round."""
    return adapters.with_factors(run.of(AdapterAveraging).trained_factors(server_round))


def of_all_rounds(adapters: AdapterPlan, run: RunSettings) -> AdapterPlan:
    """Return these adapters with all factors that are trained in any round."""
    # Factors that alternate do so from round to round, so two rounds show all of them.
    first, second = (run.of(AdapterAveraging).trained_factors(number) for number in (1, 2))
    return adapters.with_factors(tuple(name for name in FACTORS if name in first + second))


def before_round(adapters: AdapterPlan, run: RunSettings, server_round: int) -> AdapterPlan:
    """Return these adapters with the tensors that the server sends before a round."""
    job = run.of(AdapterAveraging)
    return adapters.with_factors(job.sent_factors, (server_round - 1) * job.rank_folded_by(run))


def blob_specs(adapters: AdapterPlan, run: RunSettings) -> dict[str, Mapping[str, TensorSpec]]:
    """Return the specs of the blobs with all adapters, in order."""
    return {
        key: wire_specs(shapes, run.federation.wire_dtype)
        for key, shapes in adapters.shapes().items()
    }


def parts(adapters: AdapterPlan, run: RunSettings, server_round: int = 1) -> list[list[str]]:
    """Return the blob keys of each part of a round; both directions have the same parts.

    A blob counts with its larger size.
    """
    directions = [blob_specs(before_round(adapters, run, server_round), run)]
    directions.append(blob_specs(of_round(adapters, run, server_round), run))
    sizes = [
        max(sum(spec.num_bytes for spec in specs[key].values()) for specs in directions)
        for key in directions[0]
    ]
    keys = list(directions[0])
    return [[keys[index] for index in part] for part in cut_into_parts(sizes, run.part_bytes)]
