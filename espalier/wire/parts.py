"""How a reply that is too large for one message is asked for: blobs of a part, by hash."""

from pydantic import Field

from espalier.wire.messages import Scalars


class PartRequest(Scalars):
    """Which blobs of an earlier reply the server asks for, in order of their names."""

    blob_sha256: list[str] = Field(min_length=1)
