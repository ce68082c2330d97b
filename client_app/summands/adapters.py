"""Changes of trained tensors as summands: adapters, and SFT-P's generator.

A change refers to the tensor that the round began with, which server and client have. It is clipped
to the largest change that training can make (``espalier.training.change_scale``).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from client_app.methods.fedpetuning import begins_with
from client_app.protocol.push import brought
from client_app.site import Site
from client_app.summands.weights import own_weight, weight_summand
from espalier.messages.blobs.adapters import unpack_adapters
from espalier.messages.message import MessageBody
from espalier.messages.summands import Numbers
from espalier.methods import fedpetuning, sft_p
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.mask_generator import PREFIX
from espalier.settings.training import TrainingSettings
from espalier.training.change_scale import change_scale
from espalier.training.masked_training import first_shared, generator_training


def of_adapters(
    site: Site, request: MessageBody, report: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the weighted changes of the adapters, blob by blob, and the weight."""
    adapters = fedpetuning.trained(site.model.plan, site.settings)
    begun = begins_with(site, adapters, brought(site, request))
    training = site.settings.training
    yield from _changes(site, report, blobs, adapters, begun, lambda _: training)


def of_generator(
    site: Site, request: MessageBody, report: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the weighted changes of SFT-P's generator and LoRA, blob by blob, and the weight."""
    adapters = sft_p.trained(site.model.plan, site.settings)
    begun = begins_with(
        site,
        adapters,
        brought(site, request),
        lambda _: first_shared(site.model.plan, site.settings),
    )
    of_all = site.settings.training
    of_masks = generator_training(site.settings)
    yield from _changes(
        site,
        report,
        blobs,
        adapters,
        begun,
        lambda name: of_masks if name.startswith(PREFIX) else of_all,
    )


def _changes(
    site: Site,
    report: Mapping[str, Any],
    blobs: Mapping[str, bytes],
    adapters: AdapterPlan,
    begun: Tensors,
    training_of: Callable[[str], TrainingSettings],
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    weight = own_weight(report["samples"], site.settings)
    wire_dtype = site.settings.federation.wire_dtype
    for key, shapes in adapters.shapes().items():
        found = {}
        for name, trained in unpack_adapters(shapes, blobs[key], wire_dtype).items():
            before = begun[key][name]
            scale = change_scale(training_of(name), before)
            found[name] = scale.integers(trained.double() - before.double(), weight)
        yield key, found
    yield from weight_summand(weight, site.settings)
