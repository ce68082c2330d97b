"""Requests that a client does not expect: incomplete ones, and mixtures of two requests."""

from collections.abc import Iterator, Sequence

from espalier.messages.message import Letter


def unexpected_orders(order: Letter, others: Sequence[Letter]) -> Iterator[tuple[str, Letter]]:
    """Yield unexpected requests with a description of the fault.

    They lack one field or blob, have fields or blobs of ``others``, or name other places of a run.
    """
    header = order.header
    for name in order.scalars:
        rest = {key: value for key, value in order.scalars.items() if key != name}
        yield f"without {name}", Letter(header, rest, order.blobs)
    for key in order.blobs:
        yield (
            f"without {key}",
            Letter(
                header,
                order.scalars,
                {name: blob for name, blob in order.blobs.items() if name != key},
            ),
        )
    if order.blobs:
        yield "without blobs", Letter(header, order.scalars, {})
    if order.scalars:
        yield "without fields", Letter(header, {}, order.blobs)
    rounds = header.server_round + 1, 1, 0
    for changes in ({"part": 1}, {"part": 7}, *({"server_round": number} for number in rounds)):
        if any(getattr(header, name) != value for name, value in changes.items()):
            yield (
                f"with {changes}",
                Letter(header.model_copy(update=changes), order.scalars, order.blobs),
            )
    for other in others:
        if other.header.kind == header.kind and other.blobs != order.blobs:
            yield (
                f"with blobs of round {other.header.server_round}",
                Letter(header, order.scalars, other.blobs),
            )
        if other.scalars.keys() != order.scalars.keys():
            yield f"with fields of {other.header.kind}", Letter(header, other.scalars, order.blobs)
        if other.header.kind != header.kind:
            yield (
                f"as {other.header.kind}",
                Letter(other.header.model_copy(update={"part": 0}), order.scalars, order.blobs),
            )
