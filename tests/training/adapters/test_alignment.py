"""Alignment of a sub-model: the trained tensors, the objective, and its effect on unseen text."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from espalier.data.tasks.item import Batch
from espalier.hf.families import FAMILIES
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from espalier.methods.tuning.adapters.tensors import trained
from espalier.methods.tuning.fedsoda import FedSodaSettings, emulator_adapters
from espalier.models.adapters import AdapterPlan
from espalier.models.structure import Structure
from espalier.settings.run import RunSettings, parse
from espalier.training.adapted_model import AdaptedModel
from espalier.training.alignment import Alignment, Places, Teacher, predictions
from espalier.training.initial_values import initial_adapters
from tests.hf.tiny_models import random_model, tiny_config
from tests.tiny_model import save_tiny_llama

CPU = Computing(torch.device("cpu"), torch.float32, 1)
BLOCKS = 5
GONE = [2]
KEPT = [0, 1, 3, 4]
SETTINGS = parse(
    {
        "method": "fedsoda",
        "fedsoda.adapter-layers": 1,
        "fedsoda.group-layers": 1,
        "fedsoda.groups": 1,
        "training.batch-size": 2,
        "fedsoda.align-learning-rate": 0.02,
        "lora.rank": 4,
        "lora.targets": "all",
        "evaluation.centralized": "off",
    }
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = save_tiny_llama(
        tmp_path_factory.mktemp("base"), blocks=BLOCKS, dtype=torch.float32, std=0.15
    )
    return OpenedModel(folder)


@pytest.fixture(scope="module")
def smaller(model: OpenedModel) -> OpenedModel:
    return OpenedModel(model.directory, Structure.whole(model.plan).with_blocks(KEPT))


def samples(seed: int, number: int = 8) -> Tensor:
    return torch.randint(3, 260, (number, 12), generator=torch.Generator().manual_seed(seed))


def plans(smaller: OpenedModel) -> tuple[AdapterPlan, AdapterPlan]:
    """Return the plans of the emulator (from block 1) and of the adapter (block 3)."""
    return emulator_adapters(smaller.plan, SETTINGS, [1]), trained(smaller.plan, SETTINGS)


def alignment(smaller: OpenedModel, steps: int, settings: RunSettings = SETTINGS) -> Alignment:
    emulator, adapter = plans(smaller)
    job = settings.of(FedSodaSettings)
    return Alignment(
        student=AdaptedModel.load(smaller, CPU, settings, adapter.joined(emulator)),
        family=smaller.family,
        samples=samples(0),
        places=Places({1: 2}, (2, 3)),
        settings=job.align_training(settings.training, steps),
        seed=3,
    )


def test_objective_equals_its_definition(model: OpenedModel, smaller: OpenedModel) -> None:
    """The objective is the distance relative to the teacher's mean square, plus the KL divergence.

    The reference uses whole models of transformers and all tokens.
    """
    one = alignment(smaller, 1)
    teacher = Teacher.walked(BlockStream(model, CPU), one.samples, range(8), {2, 3}, dense)
    place = {number: number for number in range(8)}
    full = AutoModelForCausalLM.from_pretrained(model.directory)
    numbers = [2, 5]
    with torch.no_grad():
        batch = Batch(
            torch.tensor([[2], [5]]), torch.ones(2, 1, dtype=torch.int64), torch.tensor(numbers)
        )
        found = one.distance(one.student.whole, batch, CPU.device, teacher, place)
        wanted, made = (
            m(one.samples[numbers], output_hidden_states=True) for m in (full, one.student.whole)
        )
    expected = torch.zeros(())
    for row in range(2):
        for of_student, of_teacher in ((1, 2), (2, 3)):
            h = wanted.hidden_states[of_teacher + 1][row]
            s = made.hidden_states[of_student + 1][row]
            expected += ((s - h) ** 2).mean() / (h**2).mean()
        p = wanted.logits[row].log_softmax(-1)
        q = made.logits[row].log_softmax(-1)
        expected += (p.exp() * (p - q)).sum(-1).mean()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_only_emulator_lora_changes(model: OpenedModel, smaller: OpenedModel) -> None:
    one, (emulator, adapter) = alignment(smaller, 60), plans(smaller)
    start = initial_adapters(emulator, 0)
    others = initial_adapters(adapter, 0)
    one.student.set({**start, **others})
    before = {name: value.clone() for name, value in one.student.whole.state_dict().items()}
    unseen = samples(99, 16)
    full = AutoModelForCausalLM.from_pretrained(model.directory)
    gap = _divergence(full, one.student.whole, unseen)
    teacher = Teacher.walked(BlockStream(model, CPU), one.samples, one.numbers(), {2, 3}, dense)
    tensors, outcome = one.run(teacher, start, others)
    assert set(tensors) == {"block-0001"}
    changed = {
        name
        for name, value in one.student.whole.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed
    assert all(".layers.1." in name and "lora_" in name for name in changed)
    assert outcome.losses[-1] < 0.7 * outcome.losses[0]
    assert _divergence(full, one.student.whole, unseen) < 0.8 * gap


def test_the_teacher_has_the_adapter_too(model: OpenedModel, smaller: OpenedModel) -> None:
    """The teacher uses the edited weights and returns the requested samples in their order."""

    def doubled(index: int) -> dict[str, object]:
        return {"mlp.down": lambda weight: 2 * weight} if index == BLOCKS - 1 else {}

    some = [1, 4, 6]
    teacher = Teacher.walked(BlockStream(model, CPU), samples(0), some, {2}, doubled)  # type: ignore[arg-type]
    full = AutoModelForCausalLM.from_pretrained(model.directory)
    with torch.no_grad():
        full.model.layers[-1].mlp.down_proj.weight.mul_(2)
        states: list[Tensor] = []
        full.model.layers[-1].register_forward_hook(
            lambda _, __, out: states.append(out if isinstance(out, Tensor) else out[0])
        )
        hidden = full(samples(0)[some], output_hidden_states=True).hidden_states[3]
    torch.testing.assert_close(teacher.outputs[2].of_samples([0, 1, 2]), hidden)
    torch.testing.assert_close(teacher.last.of_samples([2, 0]), states[0][[2, 0]])


@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2", "opt", "opt-350m"])
def test_hidden_state_predictions_are_the_model_s(model: OpenedModel, kind: str) -> None:
    if kind == "llama":
        whole = AutoModelForCausalLM.from_pretrained(model.directory)
        family = model.family
    elif kind in ("granite", "gemma2"):
        whole = random_model(tiny_config(kind))
        family = next(one for one in FAMILIES if one.name == kind)
    else:
        config = OPTConfig(
            vocab_size=50, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
            word_embed_proj_dim=16, max_position_embeddings=32, do_layer_norm_before=kind == "opt",
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            whole = OPTForCausalLM(config).eval()
        family = next(one for one in FAMILIES if one.name == "opt")
    last: list[Tensor] = []
    whole.get_submodule(family.blocks)[-1].register_forward_hook(_into(last))
    with torch.no_grad():
        logits = whole(torch.arange(4, 12)[None]).logits
        torch.testing.assert_close(predictions(whole, family, last[0]), logits)


def _into(states: list[Tensor]) -> Callable[..., None]:
    """Return a hook that appends the output of a block."""

    def note(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    return note


def _divergence(full: torch.nn.Module, sub: torch.nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        p, q = (m(tokens).logits.log_softmax(-1) for m in (full, sub.eval()))
    return float((p.exp() * (p - q)).sum(-1).mean())
