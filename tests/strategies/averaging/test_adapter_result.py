"""Results from averaged adapters against plain computation; each initial blob is read once."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.adapters import unpack_adapters
from espalier.settings.run import parse
from espalier.storage.blobs import BlobStore
from espalier.training.initial_values import initial_values
from strategies.averaging.adapters import AdapterResult
from tests.tiny_model import save_tiny_llama

Values = dict[str, dict[str, Tensor]]
LIMITS = [1, 3, 4]


class Counting(BlobStore):
    """Blob store that counts the reads of each blob."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read = Counter[str]()

    def get(self, key: str) -> bytes:
        self.read[key] += 1
        return super().get(key)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return OpenedModel(save_tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.float32))


def result_of(model: OpenedModel, folder: Path, **changes: Any) -> AdapterResult:
    flat = {
        "method": "hetlora",
        "lora.rank": 4,
        "seed": 5,
        "num-clients": 2,
        "hetlora.aggregation": "zero-pad",
    }
    return AdapterResult(
        parse(flat | {f"federation.{key}": value for key, value in changes.items()}),
        model,
        Counting(folder),
    )


def averaged(first: Values, seed: int) -> Values:
    """Return the initial values plus noise; the last rank of every adapter is zero."""
    generator = torch.Generator().manual_seed(seed)
    found: Values = {}
    for key, block in first.items():
        found[key] = {
            name: value + 0.1 * torch.randn(value.shape, generator=generator)
            for name, value in block.items()
        }
        for name, value in found[key].items():
            (value if name.endswith("_a") else value.T)[-1] = 0
    return found


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "nf4"])
def test_dead_rank_restarts_for_all_clients(
    model: OpenedModel, tmp_path: Path, wire_dtype: str
) -> None:
    """Clients receive the first ranks of the global adapters in three rounds.

    Only the rounding of the wire dtype makes a difference.
    """
    result = result_of(model, tmp_path, wire_dtype=wire_dtype)
    first = initial_values(model, result.adapters, 5)
    largest = {"float32": 0.0, "bfloat16": 2**-7, "nf4": 0.16}[wire_dtype]
    for number in range(3):
        folded = averaged(first, number)
        result.replace(iter(folded.items()), LIMITS)
        for key, block in folded.items():
            found = result.tensors(key)
            for name, value in block.items():
                if name.endswith("_a"):
                    value = torch.cat([value[:-1], first[key][name][-1:]])
                assert torch.equal(found[name], value)
                for limit in LIMITS:
                    part = value[:limit] if name.endswith("_a") else value[:, :limit]
                    begun = (
                        first[key][name][:limit]
                        if name.endswith("_a")
                        else first[key][name][:, :limit]
                    )
                    arrived = result.received(key, limit)[name]
                    assert arrived.shape == part.shape
                    change = (part - begun).abs().max()
                    # The change includes the rounding error of earlier rounds.
                    assert (arrived - part).abs().max() <= 2.5 * largest * change


def test_what_sending_lost_comes_the_next_time(model: OpenedModel, tmp_path: Path) -> None:
    """The same adapters are sent twice in NF4; the mean of both is nearer than the first."""
    result = result_of(model, tmp_path, wire_dtype="nf4")
    folded = averaged(initial_values(model, result.adapters, 5), 1)
    arrived = []
    for _ in range(2):
        result.replace(iter(folded.items()), [4])
        arrived.append(result.received("block-0000", 4)["attn.q.lora_b"])
        assert set(load(result.store.get(result.lost["4"]["block-0000"]))) == set(
            folded["block-0000"]
        )
    exact = folded["block-0000"]["attn.q.lora_b"]
    assert ((arrived[0] + arrived[1]) / 2 - exact).norm() < 0.8 * (arrived[0] - exact).norm()


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_first_adapters_are_read_once_when_needed(
    model: OpenedModel, tmp_path: Path, wire_dtype: str
) -> None:
    result = result_of(model, tmp_path, wire_dtype=wire_dtype)
    first = initial_values(model, result.adapters, 5)
    firsts = dict(result.blobs)
    store = result.store
    assert isinstance(store, Counting)
    read: list[list[int]] = []

    def folded() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for key, block in averaged(first, 1).items():
            read.append([store.read[firsts[other]] for other in firsts])
            yield key, block

    store.read.clear()
    result.replace(folded(), LIMITS)
    assert len(read) == len(firsts) > 1
    assert read == [[1] * place + [0] * (len(firsts) - place) for place in range(len(firsts))]
    assert [store.read[blob] for blob in firsts.values()] == [1] * len(firsts)


def test_sent_adapters_unpack_to_those_received(model: OpenedModel, tmp_path: Path) -> None:
    result = result_of(model, tmp_path, wire_dtype="float32")
    result.replace(iter(averaged(initial_values(model, result.adapters, 5), 2).items()), [2])
    for key, shapes in result.adapters.limited(2).shapes().items():
        found = unpack_adapters(shapes, result.blob(key, 2), "float32")
        assert all(
            torch.equal(value, result.received(key, 2)[name]) for name, value in found.items()
        )
