"""Lines of ``espalier check-node`` on what a run would send from a node."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from espalier.amounts import aligned, count
from espalier.models.plan import ModelPlan
from server_app.estimate.messages.replies import Answer, Outlook

WIDTH = 110
"""Width of an observer sentence, in characters."""
SHOWN = 4
"""Maximum number of tensor names in a line."""
COLUMNS = ("message", "bytes of tensors", "tensors", "fields")


def sends(outlook: Outlook, plan: ModelPlan | None) -> Iterator[str]:
    """Yield the answers that a run with these settings would send.

    There is one line for each kind of message, then the total, then a sentence for each kind on
    what an observer learns.
    """
    groups = outlook.alike()
    yield from aligned([COLUMNS, *(_row(group, plan) for group in groups)])
    rounds = count(outlook.rounds, "round")
    if outlook.is_known:
        prefix = "at most " if outlook.varies else ""
        yield (
            f"in {rounds} {prefix}{outlook.num_bytes:,} bytes of tensors, and some kilobytes of"
            " headers and hashes per message"
        )
        yield "  (if no client fails and no message is sent twice)"
    else:
        yield f"in {rounds}; the number of bytes is not known before the server has sent the model"
    if outlook.varies:
        yield (
            "  (the server chooses sizes, and the clients of a round; these are the largest values)"
        )
    if outlook.more_rounds:
        more = count(outlook.more_rounds, "more round")
        yield f"  (and at most {more} while work remains; max-rounds limits them)"
    yield "what a reader of the messages can learn:"
    for group in groups:
        yield from textwrap.wrap(
            f"{_called(group)}: {group[0].observer}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
        )
    yield (
        "  any failed message: the error text; a push that is not listed: that something arrived"
    )


def _row(group: Sequence[Answer], plan: ModelPlan | None) -> tuple[str, ...]:
    first = group[0]
    sizes = sorted(answer.num_bytes for answer in group)
    size_text = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
    each = " each" if len(group) > 1 else ""
    # A site without a model cannot know the shapes.
    if first.specs is None:
        return (
            _called(group),
            "not known",
            "of the model that the server sends",
            "see docs/privacy/reference.md",
        )
    in_parts = f", {first.messages} messages" if first.messages > 1 else ""
    return (
        _called(group),
        f"{size_text}{each}{in_parts}" if first.num_bytes else "0",
        _tensors(first, plan) or "none",
        ", ".join(first.fields),
    )


def _called(group: Sequence[Answer]) -> str:
    first = group[0]
    last = group[-1]
    kind = (
        # Later parts of the reply to ``train`` are fetched.
        "train, fetch"
        if first.kind == "train" and any(answer.messages > 1 for answer in group)
        else first.kind
    )
    if first.kind in ("enrol", "local_baseline", "evaluate"):
        return kind
    rounds = (
        str(first.server_round) if first is last else f"{first.server_round}-{last.server_round}"
    )
    return f"{kind} of round{'s' * (first is not last)} {rounds}"


def _tensors(answer: Answer, plan: ModelPlan | None) -> str:
    """Return the number of tensors per name and dtype, regardless of the matrix."""
    matrices = {linear.name for linear in plan.linears} if plan else set()
    counts: Counter[tuple[str, str]] = Counter()
    for tensors in (answer.specs or {}).values():
        for name, spec in tensors.items():
            # Names are ``<matrix>.<rest>``; tensors of all matrices are counted together.
            matrix, _, rest = name.rpartition(".")
            counts[rest if matrix in matrices else name, spec.dtype] += 1
    entries = [f"{number} {name} ({dtype})" for (name, dtype), number in counts.items()]
    shown = ", ".join(entries[:SHOWN])
    return f"{shown} and {len(entries) - SHOWN} more names" if len(entries) > SHOWN else shown
