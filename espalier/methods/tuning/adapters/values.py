"""Check of the numbers in blobs of adapters."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from espalier.errors import EspalierError, ProtocolError
from espalier.models.adapters import AdapterPlan
from espalier.settings.run import RunSettings

if TYPE_CHECKING:
    from torch import Tensor


class Values:
    """Check of the values of a message's blobs, one by one, and then of their largest rank."""

    def __init__(self, adapters: AdapterPlan, run: RunSettings) -> None:
        self._shapes = adapters.shapes()
        self._wire_dtype = run.federation.wire_dtype
        self._rank_in_use = 0

    def check(self, key: str, blob: bytes) -> "Mapping[str, Tensor]":
        """Check that the numbers of a blob can be read and are finite, and note the rank in use.

        Raises ProtocolError if they are not.

        Returns
        -------
        Mapping of str to Tensor
            Tensors of the blob, float32, by canonical name.
        """
        from espalier.messages.blobs.adapters import unpack_adapters

        try:
            tensors = unpack_adapters(self._shapes[key], blob, self._wire_dtype)
        except EspalierError as error:
            raise ProtocolError(f"{key} {error}") from None
        self._rank_in_use = max(self._rank_in_use, rank_in_use(tensors))
        return tensors

    def require_rank(self, rank: int) -> None:
        """Check that rows and columns beyond ``rank`` are zero in all blobs checked before.

        Raises ProtocolError if they are not.
        """
        if self._rank_in_use > rank:
            raise ProtocolError(f"blobs: not zero beyond rank {rank}, which the client reports")


def rank_in_use(tensors: "Mapping[str, Tensor]") -> int:
    """Return the number of rows of A, or columns of B, up to the last one that is not zero.

    Parameters
    ----------
    tensors : adapter tensors by canonical name; the largest number of all tensors counts
    """
    max_rank = 0
    for name, tensor in tensors.items():
        if name.endswith((".lora_a", ".lora_b")):
            # Number of the last row of A, or column of B, that is not zero.
            nonzero = (tensor != 0).any(dim=1 if name.endswith(".lora_a") else 0).nonzero()
            max_rank = max(max_rank, int(nonzero.max()) + 1 if len(nonzero) else 0)
    return max_rank
