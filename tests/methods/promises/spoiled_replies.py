"""Replies to ``train`` that violate their contract, by kind of violation."""

from collections.abc import Callable

import torch
from flwr.app import Array, Message

from espalier.messages.records import STYPE, read


def spoiled(spoil: Callable[[Message], Message]) -> Callable[[Message, Message], Message]:
    """Return a tamper that spoils replies to ``train`` and leaves other replies unchanged."""
    return lambda request, reply: (
        spoil(reply) if read(request.content).header.kind == "train" else reply
    )


def _with_blob(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Message], Message]:
    from safetensors.torch import load, save

    def spoil(reply: Message) -> Message:
        key = next(iter(reply.content["blobs"]))
        blob = save(change(load(reply.content["blobs"][key].data)))
        reply.content["blobs"][key] = Array("", (), STYPE, blob)
        return reply

    return spoil


def _shape(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([value, value]) for name, value in tensors.items()}


def _name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}x": value for name, value in tensors.items()}


def _dtype(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {name: value.view(integers[value.element_size()]) for name, value in tensors.items()}


def _bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Set every bit: every weight is pruned, or every value is NaN."""
    return {
        name: torch.full_like(value.view(torch.uint8), 255).view(value.dtype)
        for name, value in tensors.items()
    }


def _text(reply: Message) -> Message:
    reply.content["fields"]["note"] = "the patient's name"
    return reply


def _round(reply: Message) -> Message:
    reply.content["header"]["server_round"] = 7
    return reply


def _surplus(reply: Message) -> Message:
    blobs = reply.content["blobs"]
    blobs["block-0099"] = next(iter(blobs.values()))
    return reply


def _garbage(reply: Message) -> Message:
    blobs = reply.content["blobs"]
    for key in list(blobs):
        blobs[key] = Array("", (), STYPE, b"\xff" * len(blobs[key].data))
    return reply


def _attempt(reply: Message) -> Message:
    reply.content["header"]["attempt"] = 9
    return reply


def _oversize(reply: Message) -> Message:
    blobs = reply.content["blobs"]
    for key in list(blobs):
        blobs[key] = Array("", (), STYPE, blobs[key].data * 10)
    return reply


def _not_a_number(reply: Message) -> Message:
    reply.content["fields"]["seconds"] = float("nan")
    return reply


def _parts(reply: Message) -> Message:
    reply.content["header"]["num_parts"] = 1_000_000
    return reply


def _error(reply: Message) -> Message:
    reply.content["header"]["status"] = "failed"
    return reply


SPOILS: dict[str, Callable[[Message], Message]] = {
    "shape": _with_blob(_shape),
    "name": _with_blob(_name),
    "dtype": _with_blob(_dtype),
    "bits": _with_blob(_bits),
    "text": _text,
    "round": _round,
    "surplus": _surplus,
    "garbage": _garbage,
    "parts": _parts,
    "attempt": _attempt,
    "oversize": _oversize,
    "nan": _not_a_number,
    "error": _error,
}
