"""Replies of several clients, read together."""

from pathlib import Path

import numpy as np
import pytest

from espalier.messages.tensor_blobs import pack_tensors
from pruning_kernels.votes.bitmask import LINE_WORDS
from strategies.base import inbox
from strategies.base.inbox import Inbox


@pytest.mark.parametrize("clients", [1, 3, 10])
def test_words_come_in_stretches_of_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: int
) -> None:
    """Each range of the planes must begin at a cache line for the kernels."""
    monkeypatch.setattr(inbox, "STRETCH_BYTES", 5000)
    monkeypatch.setattr(inbox, "MIN_WORDS", 20)
    masks = np.random.default_rng(0).integers(0, 2**64, (clients, 1003), dtype=np.uint64)
    box = Inbox(tmp_path / "inbox")
    for client, mask in enumerate(masks):
        folder = box.root / f"{client:05d}"
        folder.mkdir(parents=True)
        (folder / "block").write_bytes(
            pack_tensors({"mask": mask, "other": np.ones(3, np.float32)})
        )
    found = np.zeros_like(masks)
    stretches = 0
    for first, words in box.words("block", "mask", range(clients)):
        assert first % LINE_WORDS == 0
        found[:, first : first + words.shape[1]] = words
        stretches += 1
    assert stretches > 1
    assert (found == masks).all()
