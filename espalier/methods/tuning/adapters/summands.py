"""Weighted adapters as integers for secure sums."""

import math

from espalier.messages.sums.summands import SumSpec, SumSpecs
from espalier.messages.sums.summed_weights import most_weight, weight_specs
from espalier.methods.tuning.adapters.tensors import of_round, trained
from espalier.models.adapters import AdapterPlan
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from pruning_kernels.bounded_fixed_point import Scale, fraction_that_fits, signed_bits

VALUE_EXPONENT = 6
"""Trained values are clipped to 2^6 as summands; LoRA's are of the order of 0.01 to 1."""
MAX_FRACTION_BITS = 32
"""Maximum number of bits after the point of a trained value as a summand."""


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of a reply's weighted adapters as summands, and of the weight."""
    return value_specs(of_round(trained(plan, run), run, server_round), run)


def value_scale(run: RunSettings) -> Scale:
    """Return the fixed point of trained values as summands, with at most 64 bits of a sum."""
    max_weight = most_weight(run)
    fraction = fraction_that_fits(VALUE_EXPONENT, run.num_clients, max_weight, MAX_FRACTION_BITS)
    return Scale(VALUE_EXPONENT, fraction)


def value_specs(adapters: AdapterPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of some tensors' weighted values as summands, and of the weight."""
    scale = value_scale(run)
    bits = signed_bits(scale.exponent + scale.fraction_bits, run.num_clients, most_weight(run))
    specs = {
        key: {name: SumSpec(math.prod(shape), bits) for name, shape in shapes.items()}
        for key, shapes in adapters.shapes().items()
    }
    return {**specs, **weight_specs(run)}
