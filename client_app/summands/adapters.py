"""Summands of trained tensors: adapters, an encoder's head, and SFT-P's generator."""

from collections.abc import Mapping

from client_app.summands.plain_blob import PlainBlob
from espalier.messages.sums.summands import Numbers
from espalier.messages.sums.summed_weights import weight_summand
from espalier.methods.tuning.adapters.summands import value_scale


def of_adapters(blob: PlainBlob) -> Mapping[str, Numbers]:
    """Return the weighted values of a blob in fixed point, clipped, or the weight.

    Blobs have the values themselves: other wire dtypes than float32 are refused with secure sums.
    """
    # The weight has a blob of its own, as one summand.
    if blob.is_weight:
        return weight_summand(blob.weight)
    scale = value_scale(blob.run)
    # Weighted before rounding, so that the sum of integers is the weighted sum.
    return {name: scale.integers(values, blob.weight) for name, values in blob.tensors().items()}
