"""What a device learns of its units: by the paper's equations with dense matrices, and the same whether cut or masked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.modeling.opened import OpenedModel
from espalier.modeling.structured.trained_cut import cut_trained
from espalier.settings.fedspine import FedSpineSettings
from espalier.settings.run import parse
from espalier.training.adapter_training import AdapterTraining
from espalier.training.unit_importance import UnitImportance
from espalier.wire.cut_units import CutUnits
from espalier.wire.fedspine import trained
from tests.modeling.tiny_models import CPU, llama_config, save_model
from tests.training.test_adapter_training import Values, sequences, start_of

SIDES = {
    "attn.q": ("groups", 0, 32), "attn.k": ("groups", 0, 16), "attn.v": ("groups", 0, 16), "attn.o": ("groups", 1, 32),
    "mlp.gate": ("channels", 0, 1), "mlp.up": ("channels", 0, 1), "mlp.down": ("channels", 1, 1),
}  # fmt: skip
"""Kind and side of the units in a matrix, and how many rows or columns each has: heads of width 16, two to a group."""
FILES = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks, each of 2 groups and 12 channels."""
    config = llama_config(
        hidden_size=64, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    return save_model(tmp_path_factory.mktemp("llama"), config)


def watched(model: OpenedModel, structure: bytes | None = None, **changes: Any) -> tuple[AdapterTraining, UnitImportance]:
    given = {f"fedspine.{key}": value for key, value in changes.items()}
    flat = {"method": "fedspine", "lora.rank": 3, "lora.alpha": 6.0, "lora.targets": "all", "training.batch-size": 2, **given}
    settings = parse({**flat, "training.learning-rate": 0.01, "training.steps": 3})
    base = OpenedModel(model.directory)
    adapters = trained(base.plan, settings, None, structure)
    training = AdapterTraining(model, CPU, settings, adapters, sequences(), 5)
    watch = UnitImportance(model, adapters, lambda: training.adapted, settings.of(FedSpineSettings))
    training.observer = watch
    return training, watch


def weights_of(directory: Path, block: int) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        stored |= load_file(file)
    return {name: stored[f"model.layers.{block}.{path}.weight"].double() for name, path in FILES.items()}


@pytest.mark.parametrize("score", ["exact", "group"])
@pytest.mark.parametrize("normalise", [True, False])
def test_units_are_worth_what_the_equations_say(directory: Path, score: str, normalise: bool) -> None:
    """Equations 10 to 12 by dense matrices, of three steps; equation 13 beside them."""
    model = OpenedModel(directory)
    training, watch = watched(model, score=score, normalise=normalise, eta=0.75)
    seen: list[tuple[Values, Values]] = []

    def both(step: int, gradients: Any) -> None:
        seen.append((training.adapted.values(), {key: dict(own) for key, own in gradients.items()}))
        watch(step, gradients)

    training.observer = both
    training.run(start_of(training), 0, 3)
    average, terms = None, []
    for values, gradients in seen:
        pieces, term = [], 0.0
        for block in range(2):
            weights, key = weights_of(directory, block), f"block-{block:04d}"
            units = {"groups": torch.zeros(2, dtype=torch.float64), "channels": torch.zeros(12, dtype=torch.float64)}
            for name, (kind, side, size) in SIDES.items():
                a, b = (values[key][f"{name}.lora_{which}"].double() for which in "ab")
                ga, gb = (gradients[key][f"{name}.lora_{which}"].double() for which in "ab")
                product = (gb @ a + b @ ga - gb @ ga) * (weights[name] + 2.0 * b @ a)
                lines = (product**2 if score == "exact" else product).sum(dim=1 - side).view(-1, size).sum(dim=1)
                own = lines if score == "exact" else lines**2
                units[kind] += own / own.norm() if normalise else own
                term += float(((b * gb) ** 2).sum())
            pieces += [units["groups"], units["channels"]]
        found = torch.cat(pieces)
        average = found if average is None else 0.75 * average + 0.25 * found
        terms.append(term)
    assert watch.units is not None
    assert average is not None
    torch.testing.assert_close(watch.units, average, rtol=1e-5, atol=1e-12)
    assert watch.taylor == pytest.approx(sum(terms) / 3, rel=1e-5)


def test_a_round_in_the_smaller_model_is_the_round_in_the_masked_one(directory: Path, tmp_path: Path) -> None:
    """Zeros in the rows and columns of what is cut, of the base and of the adapters to begin with, in the whole model."""
    base = OpenedModel(directory)
    units = CutUnits.of(base.plan)
    cut = units.none
    cut[[0, 3, 4, 9, 15, 21, 27]] = True  # a group and three channels of the first block, two and one of the second
    structure = units.structure(cut)
    training, watch = watched(OpenedModel(directory, structure), units.pack(cut))
    whole_training, whole_watch = watched(masked_copy(directory, tmp_path / "masked", units.by_block(cut)))
    start = start_of(whole_training)
    for key, own in start.items():
        for name, value in own.items():
            zero_out(value, name, units.by_block(cut)[int(key[-4:])])
    smaller, _ = training.run(cut_trained(start, base.plan, structure), 0, 3)
    whole, _ = whole_training.run(start, 0, 3)
    expected = cut_trained(whole, base.plan, structure)
    for key, own in expected.items():
        for name, value in own.items():
            torch.testing.assert_close(smaller[key][name], value, rtol=1e-4, atol=1e-6)
    assert watch.units is not None
    assert whole_watch.units is not None
    torch.testing.assert_close(watch.units, whole_watch.units[~torch.from_numpy(cut)], rtol=1e-3, atol=1e-9)
    assert watch.taylor == pytest.approx(whole_watch.taylor, rel=1e-4)


def zero_out(value: Tensor, name: str, cut: Any) -> None:
    """Zeros where a tensor of a matrix belongs to what is cut."""
    linear, _, kind = name.rpartition(".")
    of, side, size = SIDES[linear]
    if (kind, side) in (("lora_b", 0), ("weight", 0)):
        value[torch.from_numpy(cut[of]).repeat_interleave(size)] = 0
    elif (kind, side) in (("lora_a", 1), ("weight", 1)):
        value[:, torch.from_numpy(cut[of]).repeat_interleave(size)] = 0


def masked_copy(directory: Path, target: Path, cuts: Any) -> OpenedModel:
    """The model with zeros in the place of what is cut."""
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for block, cut in enumerate(cuts):
            for name, path in FILES.items():
                if (value := tensors.get(f"model.layers.{block}.{path}.weight")) is not None:
                    zero_out(value, f"{name}.weight", cut)
        save_file(tensors, file, {"format": "pt"})
    return OpenedModel(target)
