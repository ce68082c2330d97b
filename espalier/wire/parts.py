"""How a reply that is too large for one message is asked for: blobs of a part, by hash."""

from typing import Annotated

from pydantic import Field

from espalier.wire.messages import Scalars

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A hexadecimal SHA-256."""


class PartRequest(Scalars):
    """Which blobs of an earlier reply the server asks for, in order of their names."""

    blob_sha256: list[Sha256] = Field(min_length=1)
