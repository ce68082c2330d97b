"""The layer of LLM-Streamline as it travels down: a blob for each tensor, by canonical name."""

from collections.abc import Mapping

from torch import Tensor

from espalier.settings.federation import FederationSettings
from espalier.wire.adapter_payload import sums, unpack_adapters


def read_layer(
    blobs: Mapping[str, bytes], first: Mapping[str, Tensor], federation: FederationSettings
) -> dict[str, Tensor]:
    """The layer that the server sent: float32, by canonical name.

    Parameters
    ----------
    first : the layer that the run began with, from which rounded payloads hold the differences

    Raises
    ------
    Mistake
        A blob is damaged, or a number is not finite.
    """
    found: dict[str, Tensor] = {}
    for name, value in first.items():
        found |= unpack_adapters({name: tuple(value.shape)}, blobs[name], federation.payload)
    return sums(first, found) if federation.sends_differences else found
