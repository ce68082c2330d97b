"""Contracts: the permitted content of a message.

A message is checked before it leaves a node and again on arrival.

Covers: names, dtypes, shapes and number of tensors, number of bytes, names and ranges of fields,
conditions of a method on values (``check_values``), and hashes of blobs if the message or its
request names them (``blob_sha256``). A message that matches its contract has no room for text,
token ids or hidden states, except what the listed tensors and fields can encode.
Does not cover: a client that encodes other data in the permitted bits, or what the permitted
tensors themselves reveal. The ``observer`` sentence of each contract describes the latter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from espalier.amounts import count
from espalier.errors import ProtocolError
from espalier.messages.message import UNREAD, Failure, Fields, Header, MessageBody, validate
from espalier.messages.tensor_blobs import TensorSpec, tensor_specs

BlockSpecs = Mapping[str, Mapping[str, TensorSpec]]
"""Tensor specs by blob key and tensor name."""

CheckValues = Callable[[str, bytes], Any]
"""Function of a blob's key and bytes that raises ``ProtocolError`` if values are out of range.

It may return the blob's tensors as it decoded them, by name.
"""

HEADER_ROOM = 64 * 1024
"""Bytes that the safetensors header of a blob may take in addition to its data."""


@dataclass(frozen=True)
class Side:
    """One direction of a contract."""

    fields: type[Fields]
    """Description of the fields."""
    blobs: BlockSpecs = field(default_factory=dict)
    """Specs of the blobs and tensors of the message, all of which are required."""
    check_values: CheckValues | None = None
    """Check of the values of each blob."""
    check_fields: Callable[[Any], None] | None = None
    """Check of the object of class ``fields``.

    It raises ``ProtocolError`` if fields contradict each other or the request.
    """
    blob_sha256: Callable[[Fields], Mapping[str, str]] | None = None
    """Function of the fields that returns the hexadecimal SHA-256 of each blob, by key.

    It may name further blobs.
    """


@dataclass(frozen=True)
class Contract:
    """Permitted content of a request of one kind and of its reply."""

    kind: str
    method: str
    down: Side
    """Request, from server to client."""
    up: Side
    """Reply, from client to server."""
    observer: str
    """Description of what a person who reads the client's reply learns."""
    parts: Sequence[Sequence[str]] = ((),)
    """Blob keys of each part in which the reply is sent."""
    pushed: Sequence[Sequence[str]] = ()
    """Blob keys of each part that the server pushes, if the request is one of them."""

    @property
    def num_parts(self) -> int:
        """Number of parts in which the reply is sent."""
        return len(self.parts)


def check(body: MessageBody, side: Side, *, keep: bool = False) -> Fields:
    """Check a message against one side of its contract and return its fields.

    Parameters
    ----------
    keep : True to keep in ``body.tensors`` what the check of values decoded. Otherwise only the
        tensors of one blob are in memory.

    Raises
    ------
    ProtocolError
        If the content differs from the contract. The error names the difference and quotes no
        value.
    """
    # 1. Fields, 2. names and sizes of blobs, 3. their headers, 4. their values: cheap checks first.
    fields = validate(side.fields, body.fields)
    expected = side.blobs
    surplus = set(body.blobs) - set(expected)
    missing = set(expected) - set(body.blobs)
    if surplus or missing:
        raise ProtocolError(
            f"blobs: {len(surplus)} surplus and {len(missing)} missing of {len(expected)}"
        )
    # Check the total size before any blob is parsed.
    size = sum(len(blob) for blob in body.blobs.values())
    limit = byte_limit(expected)
    if size > limit:
        raise ProtocolError(f"blobs: {size} bytes, at most {limit} are allowed")
    for key, blob in body.blobs.items():
        _check_blob(key, blob, expected[key])
        if side.check_values is not None:
            tensors = side.check_values(key, blob)
            if keep and tensors is not None:
                body.tensors[key] = tensors
    if side.check_fields is not None:
        side.check_fields(fields)
    if side.blob_sha256 is not None:
        # Without the comparison each hash would be 32 bytes in which a reply could send any data.
        hashes = side.blob_sha256(fields)
        for key, blob in body.blobs.items():
            if sha256(blob).hexdigest() != hashes[key]:
                raise ProtocolError(
                    f"{key}: the bytes do not have the SHA-256 that was named for them"
                )
    return fields


def check_reply(
    reply: MessageBody, request: MessageBody, contract: Contract, *, keep: bool = False
) -> Fields:
    """Check a reply against its request and contract and return its fields.

    A reply repeats the header of its request and matches ``contract.up``. A failed reply has only a
    reason. It has the header of the request too, unless the client could not read the request.
    ``keep`` is that of ``check``.

    Raises
    ------
    ProtocolError
        If the reply belongs to another round, client, attempt or part, or if its content differs
        from the contract.
    """
    failed = reply.header.status == "failed"
    # A client that could not read the request cannot repeat its header.
    if failed and reply.header.model_copy(update={"status": "ok"}) == UNREAD:
        return check(reply, FAILED)
    # A request does not know the number of parts of its reply; a failed reply is not split.
    parts = {} if failed else {"num_parts": contract.num_parts}
    expected = request.header.model_copy(update={"status": reply.header.status, **parts})
    if reply.header != expected:
        wrong = [
            name
            for name in Header.model_fields
            if getattr(reply.header, name) != getattr(expected, name)
        ]
        raise ProtocolError(f"header: {', '.join(wrong)} not as the request demands")
    return check(reply, FAILED if failed else contract.up, keep=keep)


def byte_limit(specs: BlockSpecs) -> int:
    """Return the maximum total size in bytes of blobs with these tensors."""
    return sum(
        sum(spec.num_bytes for spec in tensors.values()) + HEADER_ROOM for tensors in specs.values()
    )


def _check_blob(key: str, blob: bytes, expected: Mapping[str, TensorSpec]) -> None:
    # Only the header of the blob is parsed.
    specs = tensor_specs(blob)
    if set(specs) != set(expected):
        raise ProtocolError(
            f"{key}: holds {count(len(specs), 'tensor')}, and not the {len(expected)} that the"
            " contract names"
        )
    for name, spec in expected.items():
        if specs[name] != spec:
            raise ProtocolError(
                f"{key} {name}: is {specs[name].dtype} {list(specs[name].shape)}, must be"
                f" {spec.dtype} {list(spec.shape)}"
            )


FAILED = Side(Failure)
"""Contract side of a failed reply: a reason and no blobs."""
