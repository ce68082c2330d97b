"""A block is read while the one before it is computed.

Blocks are read once and in order; an error is raised at the block that needs the data.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.hf.files.checkpoint import Checkpoint, ReadingAhead
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, run_through
from tests.hf.tiny_models import CPU, token_sequences


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors read from files, in order, by any thread."""
    names: list[str] = []
    read_into = Checkpoint.read_into

    def noted(self: Checkpoint, name: str, room: Tensor) -> Tensor:
        names.append(name)
        return read_into(self, name, room)

    monkeypatch.setattr(Checkpoint, "read_into", noted)
    return names


def ahead(directory: Path) -> BlockStream:
    """Return a stream on the CPU that reads ahead as on a CUDA device."""
    stream = BlockStream(OpenedModel(directory), CPU)
    stream._ahead = ReadingAhead(stream.model.checkpoint, pinned=False)
    return stream


def logits(stream: BlockStream) -> Tensor:
    return torch.cat(list(stream.logits(run_through(stream, token_sequences(3, 7)))))


def blocks_in(names: list[str]) -> list[str]:
    """Return the block of each tensor, without consecutive repeats.

    A dot stands for tensors outside all blocks.
    """
    found = [name.split(".")[2] if ".layers." in name else "." for name in names]
    return [block for place, block in enumerate(found) if place == 0 or block != found[place - 1]]


def test_blocks_are_read_once_and_in_order(untied: Path, reads: list[str]) -> None:
    found = logits(ahead(untied))
    once = list(reads)
    assert blocks_in(once) == [".", "0", "1", "2", "."]
    assert len([name for name in once if ".layers." in name]) == len(
        {name for name in once if ".layers." in name}
    )
    reads.clear()
    expected = logits(BlockStream(OpenedModel(untied), CPU))
    assert reads == once
    assert torch.equal(found, expected)


def test_next_block_is_read_ahead(untied: Path, reads: list[str]) -> None:
    stream = ahead(untied)
    assert stream._ahead is not None
    with stream.block(0, following=1):
        for begun in list(stream._ahead._begun.values()):
            begun.result()
        assert blocks_in(reads) == ["0", "1"]


def test_unannounced_block_discards_what_was_read(
    untied: Path,
) -> None:
    stream = ahead(untied)
    assert stream._ahead is not None
    with stream.block(0, following=1):
        pass
    with stream.block(2, following=0):
        assert all(".layers.0." in name for name in stream._ahead._begun)
    with stream.block(2) as block:
        assert torch.equal(
            block.mlp.up_proj.weight,
            stream.model.checkpoint.read("model.layers.2.mlp.up_proj.weight"),
        )


def test_nothing_follows_the_last_block(untied: Path) -> None:
    stream = ahead(untied)
    assert stream._ahead is not None
    with stream.block(2, following=3):
        assert stream._ahead._begun == {}


def test_read_error_is_told_at_its_block(copied: Path) -> None:
    stream = ahead(copied)
    stored = stream.model.checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    with open(copied / "model.safetensors", "r+b") as file:
        file.truncate(stored.start + stored.num_bytes - 1)
    assert stream._ahead is not None
    with stream.block(0, following=1), pytest.raises(EspalierError):
        [begun.result() for begun in list(stream._ahead._begun.values())]
    with (
        pytest.raises(
            EspalierError, match=r"model\.safetensors: ends before tensor model\.layers\.1\."
        ),
        stream.block(1),
    ):
        pass


def test_a_stream_on_a_cpu_reads_when_it_is_asked(untied: Path, reads: list[str]) -> None:
    stream = BlockStream(OpenedModel(untied), CPU)
    with stream.block(0, following=1):
        assert blocks_in(reads) == ["0"]
