"""Contracts: what a message of a kind may hold, checked before it leaves a node and again when it arrives.

Covers: names, dtypes, shapes and number of tensors, the number of bytes, names and ranges of scalars, what a method
demands of values (``check_values``), and the hashes of blobs, where the message or its request names them (``blob_sha256``).
A message that matches has no room for text, token ids or hidden states beyond what the listed tensors and scalars can encode.
Does not cover: a client that encodes something else in the permitted bits, or what the permitted tensors reveal by
themselves; each contract's ``observer`` sentence says that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from espalier.amounts import count
from espalier.settings.mistakes import Mistake
from espalier.wire.messages import UNREAD, Failure, Header, Letter, Scalars, validate
from espalier.wire.payload import TensorSpec, tensor_specs

BlockSpecs = Mapping[str, Mapping[str, TensorSpec]]
"""Tensors by blob key and tensor name."""

CheckValues = Callable[[str, bytes], None]
"""Raises Mistake if the values of a blob's tensors are out of range; gets the blob's key and the blob."""

HEADER_ROOM = 64 * 1024
"""Bytes that a blob's safetensors header may take beside its data."""


@dataclass(frozen=True)
class Side:
    """One direction of a contract."""

    scalars: type[Scalars]
    blobs: BlockSpecs | Callable[[Scalars], BlockSpecs] = field(default_factory=dict)
    """Exactly these blobs and tensors, all of them; a function where they depend on the scalars beside them."""
    check_values: CheckValues | None = None
    check_scalars: Callable[[Scalars], None] | None = None
    """Raises Mistake if the scalars do not fit each other or the request."""
    blob_sha256: Callable[[Scalars], Mapping[str, str]] | None = None
    """Hexadecimal SHA-256 that each blob must have, by key, given the scalars; it may name further blobs."""

    def specs(self, scalars: Scalars) -> BlockSpecs:
        """The blobs and tensors beside some scalars, which were validated."""
        return self.blobs(scalars) if callable(self.blobs) else self.blobs


@dataclass(frozen=True)
class Contract:
    """Both directions of one kind of message."""

    kind: str
    method: str
    down: Side
    up: Side
    observer: str
    """What somebody who reads the client's reply learns."""
    num_parts: int = 1
    """Parts in which the reply travels."""


def check(letter: Letter, side: Side) -> Scalars:
    """Hold a letter against one side of its contract and return its scalars.

    Raises
    ------
    Mistake
        The letter holds something else; the text names it and quotes no value.
    """
    scalars = validate(side.scalars, letter.scalars)
    expected = side.specs(scalars)
    surplus = set(letter.blobs) - set(expected)
    missing = set(expected) - set(letter.blobs)
    if surplus or missing:
        raise Mistake(
            f"blobs: {len(surplus)} surplus and {len(missing)} missing of {len(expected)}"
        )
    size = sum(len(blob) for blob in letter.blobs.values())
    limit = byte_limit(expected)
    if size > limit:
        raise Mistake(f"blobs: {size} bytes, at most {limit} are allowed")
    for key, blob in letter.blobs.items():
        _check_blob(key, blob, expected[key])
        if side.check_values is not None:
            side.check_values(key, blob)
    if side.check_scalars is not None:
        side.check_scalars(scalars)
    if side.blob_sha256 is not None:
        _check_hashes(letter.blobs, side.blob_sha256(scalars))
    return scalars


def check_reply(reply: Letter, request: Letter, contract: Contract) -> Scalars:
    """Hold a reply against its request and contract: it repeats the request's header, and matches the contract's ``up``.

    A failed reply needs no more than a reason; it has the request's header too, unless the client could not read the request.

    Raises
    ------
    Mistake
        It answers something else (another round, client, attempt, part), or holds something else.
    """
    failed = reply.header.status == "failed"
    if failed and reply.header.model_copy(update={"status": "ok"}) == UNREAD:
        return check(reply, FAILED)
    parts = {} if failed else {"num_parts": contract.num_parts}
    expected = request.header.model_copy(update={"status": reply.header.status, **parts})
    if reply.header != expected:
        wrong = [
            name
            for name in Header.model_fields
            if getattr(reply.header, name) != getattr(expected, name)
        ]
        raise Mistake(f"header: {', '.join(wrong)} not as the request demands")
    return check(reply, FAILED if failed else contract.up)


def _check_hashes(blobs: Mapping[str, bytes], expected: Mapping[str, str]) -> None:
    """A hash that nobody compares would be 32 bytes in which a reply can say anything."""
    for key, blob in blobs.items():
        if sha256(blob).hexdigest() != expected[key]:
            raise Mistake(f"{key}: the bytes do not have the SHA-256 that was named for them")


def byte_limit(specs: BlockSpecs) -> int:
    """Most bytes that blobs of these tensors may have together."""
    return sum(
        sum(spec.num_bytes for spec in tensors.values()) + HEADER_ROOM for tensors in specs.values()
    )


def _check_blob(key: str, blob: bytes, expected: Mapping[str, TensorSpec]) -> None:
    found = tensor_specs(blob)
    if set(found) != set(expected):
        raise Mistake(
            f"{key}: holds {count(len(found), 'tensor')}, and not the {len(expected)} that the"
            " contract names"
        )
    for name, spec in expected.items():
        if found[name] != spec:
            raise Mistake(
                f"{key} {name}: is {found[name].dtype} {list(found[name].shape)}, must be"
                f" {spec.dtype} {list(spec.shape)}"
            )


FAILED = Side(Failure)
"""The reply of a client that could not do its part: a reason and nothing else."""
