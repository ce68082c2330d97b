"""Memory of checking a result: independent of the depth, at most 1.3 times that of training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.hf.export.adapter import (
    check_adapter,
    check_encoder_adapter,
    export_adapter,
)
from espalier.hf.export.encoder import check_encoder, export_encoder
from espalier.hf.export.model import check_export, export_edited
from espalier.hf.machine.traced_memory import LiveBytes
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.structured.export import check_structured, export_structured
from espalier.hf.whole.adapters import merged
from espalier.models.adapters import HEAD_KEY, AdapterPlan, adapter_plan
from espalier.models.structure import Structure
from espalier.settings.run import RunSettings, parse
from espalier.training.adapted_model import AdaptedModel
from tests.hf.tiny_encoders import save_encoder
from tests.hf.tiny_models import CPU, llama_config, save_model, token_sequences
from tests.tiny_model import save_tokenizer

FEW = 3
MANY = 12
SAMPLES = token_sequences(2, 9)


class RealBytes(LiveBytes):
    """Live bytes without tensors on the meta device, which use no memory."""

    def note(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            super().note(tensor)


class Trained:
    """Model with some blocks and trained adapters on all its matrices."""

    def __init__(self, folder: Path, blocks: int, encoder: bool = False) -> None:
        sizes = {"num_hidden_layers": blocks, "hidden_size": 64, "intermediate_size": 128}
        self.folder = folder
        self.classes = 3 if encoder else None
        if encoder:
            save_encoder(folder / "base", "bert", **sizes)
            save_tokenizer(folder / "base")
        else:
            save_model(folder / "base", llama_config(**sizes), dtype=torch.bfloat16)
        self.model = OpenedModel(folder / "base")
        self.settings: RunSettings = parse(
            {"method": "fedpetuning", "lora.targets": "all", "lora.rank": 2}
        )
        self.plan: AdapterPlan = adapter_plan(
            self.model.plan, self.settings.lora, self.classes or 0
        )
        generator = torch.Generator().manual_seed(3)
        self.tensors = {
            key: {
                name: 0.1 * torch.randn(shape, generator=generator) for name, shape in own.items()
            }
            for key, own in self.plan.shapes().items()
        }
        self.edits = merged(self.plan, self.tensors)

    def training(self, base: str) -> int:
        """Return the peak bytes of a training step."""
        training = self.settings.training.model_copy(update={"base": base})
        with RealBytes([]) as live:
            adapted = AdaptedModel.load(
                self.model, CPU, self.settings.model_copy(update={"training": training}), self.plan
            )
            labels = SAMPLES if self.classes is None else torch.tensor([0, 2])
            adapted.whole(input_ids=SAMPLES, labels=labels).loss.backward()
        return live.most

    def check(self, what: str) -> int:
        """Return the peak bytes of checking the written result."""
        target = self.folder / what.replace(" ", "-")
        model = self.model
        check: Any = getattr(self, f"_{what.replace(' ', '_').replace('-', '_')}")(model, target)
        with RealBytes([]) as live:
            check()
        return live.most

    def _adapter(self, model: OpenedModel, target: Path) -> Any:
        export_adapter(model, self.plan, self.tensors.__getitem__, target)
        return lambda: check_adapter(BlockStream(model, CPU), self.edits, target, SAMPLES)

    def _merged(self, model: OpenedModel, target: Path) -> Any:
        export_edited(model, self.edits, target)
        return lambda: check_export(BlockStream(model, CPU), self.edits, target, SAMPLES)

    def _compact(self, model: OpenedModel, target: Path) -> Any:
        return self._smaller(model, target, "compact")

    def _zero_filled(self, model: OpenedModel, target: Path) -> Any:
        return self._smaller(model, target, "zero-filled")

    def _smaller(self, model: OpenedModel, target: Path, form: Any) -> Any:
        cut = Structure.whole(model.plan).keeping({0: {"channels": range(100)}})
        small = OpenedModel(model.directory, cut)
        export_structured(small, lambda _: {}, target, form)
        return lambda: check_structured(BlockStream(small, CPU), target, SAMPLES, form)

    def _encoders_adapter(self, model: OpenedModel, target: Path) -> Any:
        export_adapter(model, self.plan, self.tensors.__getitem__, target)
        assert self.classes

        def check() -> None:
            check_encoder_adapter(model, CPU, self.edits, self.tensors[HEAD_KEY], target)

        return check

    def _merged_encoder(self, model: OpenedModel, target: Path) -> Any:
        head = self.tensors[HEAD_KEY]
        export_encoder(model, self.edits, head, ("a", "b", "c"), target)

        def check() -> None:
            check_encoder(model, self.edits, head, target)

        return check


DECODERS = ("adapter", "merged", "compact", "zero-filled")
ENCODERS = ("encoders adapter", "merged encoder")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], Trained]:
    sizes = [(blocks, encoder) for blocks in (FEW, MANY) for encoder in (False, True)]
    return {
        (blocks, encoder): Trained(tmp_path_factory.mktemp("model"), blocks, encoder)
        for blocks, encoder in sizes
    }


@pytest.mark.parametrize("what", [*DECODERS, *ENCODERS])
def test_memory_does_not_grow_with_blocks(made: dict[tuple[int, bool], Trained], what: str) -> None:
    """Nine more blocks would add 1.3 MB. peft loads all adapters, which are 15 kB per block."""
    few, many = (made[blocks, what in ENCODERS] for blocks in (FEW, MANY))
    adapters = 4 * (many.plan.num_parameters - few.plan.num_parameters) if "adapter" in what else 0
    assert many.check(what) - few.check(what) <= 3 * adapters + 10_000


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
@pytest.mark.parametrize("what", [*DECODERS, *ENCODERS])
def test_check_memory_is_at_most_1_3_of_training(
    made: dict[tuple[int, bool], Trained], what: str, base: str
) -> None:
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    trained = made[MANY, what in ENCODERS]
    assert trained.check(what) <= 1.3 * trained.training(base)
