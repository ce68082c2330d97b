"""Federations of the methods whose clients' tensors can be summed secretly."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from server_app.artifacts import personal_models
from tests.bench import Home
from tests.federation.secure_sum.test_summands import (
    BY_SAMPLES,
    EXACT,
    MEAN,
    SFT_P,
    SODA,
    SPA,
    TUNED,
    save_deep,
)
from tests.methods.promises.federations import Federations

ONE_ROUND = TUNED | BY_SAMPLES | {"federation.rounds": 1}


class FlapSums(Federations):
    method = "flap"
    settings: ClassVar[dict[str, Any]] = EXACT["flap"]


class LlmPrunerSums(Federations):
    method = "llm-pruner"
    settings: ClassVar[dict[str, Any]] = EXACT["llm-pruner"]


class SliceGptSums(Federations):
    method = "slicegpt"
    settings: ClassVar[dict[str, Any]] = MEAN | {
        "slicegpt.width-pruning-ratio": 0.25,
        "slicegpt.multiple": 4,
    }


class FedSpaLlmSums(Federations):
    method = "fedspallm"
    settings: ClassVar[dict[str, Any]] = SPA


class FedSodaSums(Federations):
    """Federations on a model of three blocks, wide enough for NF4."""

    method = "fedsoda"
    settings: ClassVar[dict[str, Any]] = ONE_ROUND | SODA

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Home:
        """Create the model and the texts for the alignment and the evaluation."""
        shared = save_deep(tmp_path_factory.mktemp("home"))
        align = str(shared.public.parent / "align.txt")
        cls.settings = {**cls.settings, "public.text": align}
        return shared


class SftPSums(Federations):
    method = "sft-p"
    settings: ClassVar[dict[str, Any]] = ONE_ROUND | SFT_P | {"federation.client-weights": "equal"}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def no_pictures(cls) -> Iterator[None]:
        """Draw no pictures: drawing takes most of a run's time."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(personal_models, "draw", lambda figures, folder: [])
            yield


class FedSbSums(Federations):
    """Federations whose matrices have enough values to be searched for."""

    method = "fed-sb"
    settings: ClassVar[dict[str, Any]] = ONE_ROUND | {
        "lora.rank": 4,
        "training.learning-rate": 0.1,
    }


class FfaSums(Federations):
    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = ONE_ROUND | {"fedpetuning.aggregation": "ffa"}


class RoloraSums(Federations):
    """Federations with two rounds: clients send B, then A."""

    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = TUNED | {"fedpetuning.aggregation": "rolora"}
