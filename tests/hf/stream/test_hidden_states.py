"""Hidden states between blocks, in memory and in a file without a name."""

import errno
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.stream.calibration import prune_by_block
from espalier.hf.stream.hidden_states import OnDisk, hidden_states
from pruning_kernels.selection.local_pruning import LocalPruning
from tests.hf.tiny_models import llama_config, save_model, token_sequences

pytestmark = pytest.mark.usefixtures("tests_on_device")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return OpenedModel(save_model(tmp_path_factory.mktemp("model") / "llama", llama_config()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spilled", [False, True])
def test_latest_batch_is_returned(tmp_path: Path, dtype: torch.dtype, spilled: bool) -> None:
    kept = hidden_states(tmp_path if spilled else None)
    batches = [
        torch.arange(samples * 6).view(samples, 2, 3).to(dtype) + 0.5 for samples in (4, 4, 1)
    ]
    for batch in batches:
        kept.append(batch.clone())
    kept[1] = batches[1] * 2
    expected = [batches[0], batches[1] * 2, batches[2]]
    assert len(kept) == 3
    for index, batch in enumerate(expected):
        assert kept[index].dtype == dtype
        assert torch.equal(kept[index], batch)


def test_the_file_has_no_name(tmp_path: Path) -> None:
    kept = OnDisk(tmp_path)
    kept.append(torch.ones(2, 2, 2))
    assert list(tmp_path.iterdir()) == []


def test_non_contiguous_value_is_kept(tmp_path: Path) -> None:
    batch = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    kept = OnDisk(tmp_path)
    kept.append(batch)
    assert torch.equal(kept[0], batch)


def test_full_disk_names_folder_and_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = OnDisk(tmp_path)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(
        EspalierError,
        match=f"{tmp_path}: No space left on device; free some disk space, or set activations",
    ):
        kept.append(torch.ones(1, 2, 2))


def test_a_write_that_is_cut_short_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, place: whole(handle, data[:5], place))
    kept = OnDisk(tmp_path)
    kept.append(torch.arange(12.0).view(1, 3, 4))
    assert torch.equal(kept[0], torch.arange(12.0).view(1, 3, 4))


def test_activation_place_changes_no_result(
    model: OpenedModel, tmp_path: Path, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 64)
    samples = token_sequences(11, 8)
    choose = LocalPruning("wanda", 0.5, "row").prune_mask
    found = []
    for where in (computing, replace(computing, activations_folder=tmp_path)):
        stream = BlockStream(model, where)
        masks = [
            mask for _, masks in prune_by_block(stream, samples, choose) for mask in masks.values()
        ]
        found.append([*masks, *stream.logits(run_through(stream, samples))])
    for memory, disk in zip(*found, strict=True):
        assert torch.equal(memory, disk)


@pytest.mark.parametrize("spilled", [False, True])
def test_activations_go_on_where_they_were_kept(
    model: OpenedModel,
    tmp_path: Path,
    spilled: bool,
    computing: Computing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 64)
    stream = BlockStream(
        model, replace(computing, activations_folder=tmp_path if spilled else None)
    )
    samples = token_sequences(11, 8)
    activations = stream.start(samples)
    with stream.block(0) as block, torch.no_grad():
        activations.through(0, block)
    kept = b"".join(activations.pieces())
    # The factors are float32 bytes, sequences, tokens and hidden size.
    assert len(kept) == 4 * 11 * 8 * 32
    resumed = stream.resume(samples, io.BytesIO(kept))
    assert b"".join(resumed.pieces()) == kept
    for wrong, word in ((kept[:-1], "short"), (kept + b"0", "long")):
        with pytest.raises(EspalierError, match=word):
            stream.resume(samples, io.BytesIO(wrong))


def test_common_arguments_are_held_once(
    model: OpenedModel, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 64)
    # Batches of 8, 8 and 4 sequences.
    activations = BlockStream(model, computing).start(token_sequences(20, 8))
    first, second, _ = activations._calls
    assert first is second
