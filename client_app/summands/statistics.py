"""Statistics of calibration samples as summands."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from client_app.site import Site
from client_app.summands.weights import own_weight, weight_summand
from espalier.messages.message import MessageBody
from espalier.messages.summands import Numbers
from espalier.messages.tensor_blobs import views
from espalier.methods.llm_pruner import score_scale
from espalier.methods.pooled_pruning import COUNT
from espalier.methods.slicegpt import MOMENTS, moment_scale
from pruning_kernels.fixed_point import to_wide


def of_input_sums(
    site: Site, request: MessageBody, report: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the sums of a reply that are in fixed point already, and counts (FLAP).

    Nothing is rounded or clipped: a client refuses to send a number that is out of range.
    """
    for key, blob in blobs.items():
        yield (
            key,
            {
                name: words if name == COUNT else to_wide(words)
                for name, words in views(blob).items()
            },
        )


def of_scores(
    site: Site, request: MessageBody, report: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the scores of each block's groups in fixed point, clipped (LLM-Pruner)."""
    scale = score_scale(site.settings)
    for key, blob in blobs.items():
        scores = views(blob)
        yield key, {name: scale.integers(torch.tensor(own)) for name, own in scores.items()}


def of_moments(
    site: Site, request: MessageBody, report: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the weighted second moments of each place in fixed point, and the weight (SliceGPT)."""
    scale = moment_scale(site.model.plan, site.settings)
    weight = own_weight(report["samples"], site.settings)
    for key, blob in blobs.items():
        yield key, {MOMENTS: scale.integers(torch.tensor(views(blob)[MOMENTS]), weight)}
    yield from weight_summand(weight, site.settings)
