"""Sub-model of FedSODA: its aligned blocks and those of the full model, by hand."""

from pathlib import Path
from typing import Any

import pytest

from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import parse
from espalier.storage.blobs import BlobStore
from espalier.training.alignment import Places
from strategies.tuning.fedsoda.sub_model import SubModelResult
from tests.tiny_model import save_tiny_llama

SETTINGS = {
    "method": "fedsoda",
    "fedsoda.emulator": "stored",
    "fedsoda.adapter-layers": 2,
    "evaluation.centralized": "off",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return OpenedModel(save_tiny_llama(tmp_path_factory.mktemp("base"), blocks=8))


def result(
    base: OpenedModel, folder: Path, dropped: list[int], starts: list[int], **changes: Any
) -> SubModelResult:
    settings = parse(
        SETTINGS | {f"fedsoda.{key.replace('_', '-')}": value for key, value in changes.items()}
    )
    made = SubModelResult(settings, base, BlobStore(folder / "blobs"), folder / "sub-model")
    made.decide(dropped, starts, [])
    return made


def test_two_groups_of_two(base: OpenedModel, tmp_path: Path) -> None:
    """Blocks 0 and 3 stand for 1, 2 and 4, 5.

    The output of block 0 is compared with that of block 2, and the output of block 3, now the
    second block, with that of block 5.
    """
    made = result(base, tmp_path, [1, 2, 4, 5], [0, 3], group_layers=2, groups=2)
    assert made.kept == [0, 3, 6, 7]
    assert made.aligned_blocks == [0, 1]
    assert made.places() == Places({0: 2, 1: 5}, (1, 5))


def test_groups_apart(base: OpenedModel, tmp_path: Path) -> None:
    """Groups of one block at 1 and 4, with kept blocks between and behind them."""
    made = result(base, tmp_path, [2, 5], [1, 4], group_layers=1, groups=2)
    assert made.kept == [0, 1, 3, 4, 6, 7]
    assert made.aligned_blocks == [1, 3]
    assert made.places() == Places({1: 2, 3: 5}, (3, 5))


def test_whole_emulator_is_between_adapter_blocks(base: OpenedModel, tmp_path: Path) -> None:
    """FedOT: the first block and the last two are the adapter.

    Only the end of the emulator is compared with the full model.
    """
    evenly = {"drop": "uniform", "first_layers": 1}
    made = result(base, tmp_path, [2, 4], [], **evenly)
    assert made.kept == [0, 1, 3, 5, 6, 7]
    assert made.aligned_blocks == [1, 2, 3]
    assert made.places() == Places({}, (3, 5))
