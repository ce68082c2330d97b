"""Fixtures of the tests of structures."""

from pathlib import Path

import pytest

from tests.hf.structured.structured_models import DECODERS, ENCODERS, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp("base"), name) for name in (*DECODERS, *ENCODERS)}
