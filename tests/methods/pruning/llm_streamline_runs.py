"""Federations of LLM-Streamline, and what tests read of their runs."""

from typing import Any, ClassVar

import pytest

from tests.bench import Home, home
from tests.methods.promises.federations import Federations
from tests.tiny_model import save_tiny_llama

BLOCKS = 4
STEPS = 3
RATE = 1e-2


class LlmStreamlineRuns(Federations):
    """Federations in which one layer replaces two of four blocks and is trained for two rounds."""

    method = "llm-streamline"
    settings: ClassVar[dict[str, Any]] = {
        "pruning.ratio": 0.25,
        "llm-streamline.steps": STEPS,
        "llm-streamline.batch-size": 2,
        "llm-streamline.learning-rate": RATE,
        "federation.rounds": 2,
        "part-bytes": 4096,
    }
    last_round = 2
    result_round = 4
    cuts_samples = "calibration_samples"

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Home:
        made = home(tmp_path_factory.mktemp("home"))
        save_tiny_llama(made.model, blocks=BLOCKS)
        return made
