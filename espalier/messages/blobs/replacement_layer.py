"""Layer of LLM-Streamline as the server sends it: one blob per tensor, by canonical name."""

from collections.abc import Mapping

from torch import Tensor

from espalier.messages.blobs.adapters import sums, unpack_adapters
from espalier.settings.federation import FederationSettings


def read_layer(
    blobs: Mapping[str, bytes], first: Mapping[str, Tensor], federation: FederationSettings
) -> dict[str, Tensor]:
    """Read the layer that the server sent: float32, by canonical name.

    Parameters
    ----------
    blobs
        Blob of each tensor by canonical name.
    first
        Layer at the beginning of the run. Rounded wire dtypes carry differences from it.
    federation
        Settings of the federation.

    Raises
    ------
    ProtocolError
        If a blob is damaged, or if a number is not finite.
    """
    found: dict[str, Tensor] = {}
    for name, value in first.items():
        found |= unpack_adapters({name: tuple(value.shape)}, blobs[name], federation.wire_dtype)
    return sums(first, found) if federation.sends_differences else found
