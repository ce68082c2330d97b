"""Tiny models shared by several test files; no test changes them."""

from pathlib import Path

import pytest
import torch

from espalier.hf.machine.computing import Computing
from tests.hf.tiny_models import llama_config, save_model


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaMA with an untied language-model head, in one file."""
    return save_model(tmp_path_factory.mktemp("untied"), llama_config())


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several shards."""
    return save_model(tmp_path_factory.mktemp("sharded"), llama_config(), max_shard_size="20KB")


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaMA whose head is tied to its embedding."""
    return save_model(tmp_path_factory.mktemp("tied"), llama_config(tie_word_embeddings=True))


@pytest.fixture
def copied(untied: Path, tmp_path: Path) -> Path:
    """Copy of the untied model, for a test to damage."""
    import shutil

    return Path(shutil.copytree(untied, tmp_path / "copied"))


@pytest.fixture
def computing(device: torch.device) -> Computing:
    """float32 on each device in turn."""
    return Computing(device, torch.float32, 1)
