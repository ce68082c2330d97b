"""Requests that a client does not expect: incomplete ones, and mixtures of two requests."""

from collections.abc import Iterator, Sequence

from espalier.messages.message import MessageBody


def unexpected_orders(
    order: MessageBody, others: Sequence[MessageBody]
) -> Iterator[tuple[str, MessageBody]]:
    """Yield unexpected requests with a description of the fault.

    They lack one field or blob, have fields or blobs of ``others``, or name other places of a run.
    """
    header = order.header
    for name in order.fields:
        rest = {key: value for key, value in order.fields.items() if key != name}
        yield f"without {name}", MessageBody(header, rest, order.blobs)
    for key in order.blobs:
        yield (
            f"without {key}",
            MessageBody(
                header,
                order.fields,
                {name: blob for name, blob in order.blobs.items() if name != key},
            ),
        )
    if order.blobs:
        yield "without blobs", MessageBody(header, order.fields, {})
    if order.fields:
        yield "without fields", MessageBody(header, {}, order.blobs)
    rounds = header.server_round + 1, 1, 0
    for changes in ({"part": 1}, {"part": 7}, *({"server_round": number} for number in rounds)):
        if any(getattr(header, name) != value for name, value in changes.items()):
            yield (
                f"with {changes}",
                MessageBody(header.model_copy(update=changes), order.fields, order.blobs),
            )
    for other in others:
        if other.header.kind == header.kind and other.blobs != order.blobs:
            yield (
                f"with blobs of round {other.header.server_round}",
                MessageBody(header, order.fields, other.blobs),
            )
        if other.fields.keys() != order.fields.keys():
            yield (
                f"with fields of {other.header.kind}",
                MessageBody(header, other.fields, order.blobs),
            )
        if other.header.kind != header.kind:
            yield (
                f"as {other.header.kind}",
                MessageBody(other.header.model_copy(update={"part": 0}), order.fields, order.blobs),
            )
