"""How a reply that is too large for one message is asked for: blobs of a part, by hash."""

from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.wire.messages import Letter, Scalars

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A hexadecimal SHA-256."""


class PartRequest(Scalars):
    """Which blobs of an earlier reply the server asks for, in order of their names."""

    blob_sha256: list[Sha256] = Field(min_length=1)


def hashes_of_part(request: Letter, reply: Iterable[str], part: Iterable[str]) -> Callable[[Scalars], dict[str, str]]:
    """What the blobs of a part must have as SHA-256, by key, given the scalars that came with them.

    A report also names those of later parts, which are compared when these are fetched.

    Parameters
    ----------
    request : a ``train``, whose report names the hashes of the whole reply, or a ``fetch``, which names those of its part
    reply : keys of all blobs of the reply, in the order of the report
    part : keys of the part's blobs
    """
    fetched = request.header.kind == "fetch"
    keys = sorted(part) if fetched else list(reply)

    def named(scalars: Scalars) -> dict[str, str]:
        hashes = (request.scalars if fetched else scalars.model_dump()).get("blob_sha256", [])
        if len(hashes) != len(keys):
            raise Mistake(f"{request.header.kind}: {len(hashes)} hashes for {len(keys)} blobs")
        return dict(zip(keys, hashes, strict=True))

    return named
