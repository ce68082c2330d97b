"""Fixtures of the tests of NF4."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hf.nf4.nf4_folders import CONFIGS, written
from tests.hf.tiny_models import llama_config, save_model

LONG = llama_config(hidden_size=128, intermediate_size=320, num_hidden_layers=1)
"""Model whose larger matrices have 640 scales: two and a half blocks of nested scales."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a tiny model of a family, once per module."""
    root = tmp_path_factory.mktemp("saved")

    def save(name: str) -> Path:
        directory = root / name
        return directory if directory.exists() else save_model(directory, CONFIGS[name])

    return save


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("long"), LONG)


@pytest.fixture
def folder(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """LLaMA in NF4 with double quantisation, for a test to damage."""
    return written(saved("llama"), tmp_path / "nf4", True)
