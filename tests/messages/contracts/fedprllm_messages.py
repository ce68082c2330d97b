"""Messages of FedPrLLM by hand."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from espalier.errors import EspalierError
from espalier.messages.contract import check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import Header, MessageBody, request_header
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import RunSettings
from tests.run_names import BY_HAND

SECRET = "Anna K., born 1961, diagnosis F32.1"
SHA = "0" * 64
PLAN = ModelPlan(
    tuple(
        BlockPlan(index, (LinearPlan("attn.q", "q", (4, 6)), LinearPlan("mlp.up", "up", (3, 30))))
        for index in range(2)
    ),
    500,
)
"""Two blocks, each with a matrix of 24 weights and one of 90.

The mask of 24 weights has one word; that of 90 weights has two, with 38 bits of padding.
"""
SETTINGS = RunSettings()


def words(value: int, number: int) -> NDArray[np.uint64]:
    return np.array([value >> 64 * index & (2**64 - 1) for index in range(number)], dtype=np.uint64)


def blob(tensors: Mapping[str, NDArray], **extra: Any) -> bytes:
    """Return a safetensors blob made by hand, with the tensors in the given order."""
    header: dict[str, Any] = dict(extra)
    data = b""
    for name, value in tensors.items():
        dtype = {"uint64": "U64", "int64": "I64", "int32": "I32", "uint8": "U8", "float32": "F32"}[
            str(value.dtype)
        ]
        header[name] = {
            "dtype": dtype,
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + value.nbytes],
        }
        data += value.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def header(**changes: Any) -> Header:
    usual = request_header("fedprllm", "train", 1, client=3, lineage=BY_HAND)
    return usual.model_copy(update=changes)


REQUEST = MessageBody(header())


def refused(reply: MessageBody, request: MessageBody = REQUEST) -> str:
    """Return the text of the refusal, which quotes no private value."""
    with pytest.raises(EspalierError) as caught:
        check_reply(reply, request, contract_for(request, lambda: PLAN, SETTINGS))
    assert "Anna" not in str(caught.value)
    return str(caught.value)
