"""Adapters learn on every base dtype and repeatably; the base model does not change."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import OPTConfig, PretrainedConfig

from espalier.data.tasks.encoding import Encoded
from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.adapters import put_in, set_values
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.settings.run import RunSettings, parse
from espalier.training.adapted_model import AdaptedModel
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_adapters
from espalier.training.loop import Loop, Trained
from espalier.training.sequences import Sequences, encoded_sequences
from tests.hf.tiny_models import CPU, VOCABULARY, llama_config, save_model

Values = dict[str, dict[str, Tensor]]
T = TypeVar("T", bound=Tensor)
SETTINGS = {
    "method": "fedpetuning", "lora.rank": 2, "lora.alpha": 4.0, "lora.targets": "all",
    "training.batch-size": 2, "training.learning-rate": 0.01, "training.steps": 3,
    "federation.rounds": 2,
}  # fmt: skip


def opt_config() -> OPTConfig:
    return OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, word_embed_proj_dim=32,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, init_std=0.2,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: llama_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2),
    "opt": opt_config,
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LLaMA that NF4 can represent, and an OPT with dropout of its own."""
    return {
        name: save_model(tmp_path_factory.mktemp(name), config())
        for name, config in CONFIGS.items()
    }


@pytest.fixture
def llama(directories: dict[str, Path]) -> OpenedModel:
    return OpenedModel(directories["llama"])


def sequences() -> Sequences:
    """Seven sequences with answers of unequal lengths."""
    generator = torch.Generator().manual_seed(2)
    lengths = [(9, 4), (6, 5), (11, 1), (4, 2), (8, 8), (10, 3), (7, 6)]
    ids = [
        torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length, _ in lengths
    ]
    rows = zip(ids, lengths, strict=True)
    return encoded_sequences(
        tuple(Encoded(tuple(row), min(answer, len(row) - 1)) for row, (_, answer) in rows),
    )


def settings_of(**changes: Any) -> RunSettings:
    return parse(
        SETTINGS
        | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    )


def training_of(
    model: OpenedModel, computing: Computing = CPU, seed: int = 5, **changes: Any
) -> AdapterTraining:
    settings = settings_of(**changes)
    return AdapterTraining(
        model, computing, settings, adapter_plan(model.plan, settings.lora), sequences(), seed
    )


def start_of(training: AdapterTraining) -> Values:
    """Return adapters with B not zero, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(8)
    return {
        key: {
            name: value + 0.02 * torch.randn(value.shape, generator=generator)
            for name, value in block.items()
        }
        for key, block in initial_adapters(training.adapters, 3).items()
    }


def trained_from_start(model: OpenedModel, steps: int = 3, **options: Any) -> Values:
    training = training_of(model, **options)
    return training.run(start_of(training), 0, steps)[0]


def adapted(
    model: OpenedModel, settings: RunSettings, computing: Computing = CPU, base: Any = "float32"
) -> tuple[Any, dict[str, nn.Parameter]]:
    """Return the whole model with initial adapters, and their parameters."""
    plan = adapter_plan(model.plan, settings.lora)
    whole = load_whole(model, computing, base)
    parameters = put_in(whole, model.family, plan, len(model.plan.blocks), settings.lora.dropout)
    set_values(parameters, initial_adapters(plan, 3))
    return whole, flat(parameters)


def flat(tensors: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    return {
        f"{key}/{name}": value for key, block in tensors.items() for name, value in block.items()
    }


def same(one: Values, other: Values) -> bool:
    return flat(one).keys() == flat(other).keys() and all(
        torch.equal(flat(one)[name], flat(other)[name]) for name in flat(one)
    )


@pytest.fixture
def gradients() -> Iterator[list[list[Tensor]]]:
    """All gradients that each step of the optimiser receives."""
    found: list[list[Tensor]] = []

    def note(optimizer: Any, *_: Any) -> None:
        found.append([parameter.grad.clone() for parameter in optimizer.param_groups[0]["params"]])

    handle = register_optimizer_step_pre_hook(note)
    yield found
    handle.remove()


# ----- learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
def test_the_loss_falls_on_every_base(llama: OpenedModel, base: str, device: torch.device) -> None:
    """All seven sequences are in every step, so the model memorises them."""
    training = training_of(
        llama, Computing(device, torch.float32, 1), training__base=base, training__batch_size=7
    )
    found, trained = training.run(initial_adapters(training.adapters, 3), 0, 25)
    assert trained.losses[-1] < 0.5 * trained.losses[0]
    assert {value.dtype for value in flat(found).values()} == {torch.float32}
    assert {value.device.type for value in flat(found).values()} == {"cpu"}
    assert {name: tuple(value.shape) for name, value in flat(found).items()} == {
        f"{key}/{name}": shape
        for key, block in training.adapters.shapes().items()
        for name, shape in block.items()
    }
    assert training.num_sequences == 7


@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_no_weight_of_the_base_changes(llama: OpenedModel, base: Any, device: torch.device) -> None:
    whole, learning = adapted(llama, settings_of(), Computing(device, torch.bfloat16, 1), base)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    Loop(whole, learning, settings_of().training, 7, sequences().batch, 5, 6).run(0, 3)
    changed = {
        name for name, value in whole.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {name for name in before if "lora_" in name}
    assert {value.dtype for value in learning.values()} == {torch.float32}
    assert not [
        name
        for name, value in whole.named_parameters()
        if value.grad is not None and "lora_" not in name
    ]


def test_total_steps_cover_rounds_and_parties(llama: OpenedModel) -> None:
    """The run has two rounds of three steps; pooled training of four clients has 24 steps."""
    training = training_of(llama)
    assert training.total_steps == 6
    assert replace(training, parties=4).total_steps == 24


# ----- accumulation and checkpointing -------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [2, 3, 6])
def test_accumulated_batches_are_one_larger_batch(
    llama: OpenedModel, accumulation: int, gradients: list[list[Tensor]], device: torch.device
) -> None:
    """Covers batches with unequal numbers of predicted tokens."""
    for parts in (1, accumulation):
        chosen = {"training__batch_size": 6 // parts, "training__accumulation": parts}
        trained_from_start(llama, 1, computing=Computing(device, torch.float32, 1), **chosen)
    for whole, summed in zip(*gradients, strict=True):
        assert whole.abs().max() > 0
        torch.testing.assert_close(summed, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", CONFIGS)
def test_checkpointing_changes_no_gradient(
    directories: dict[str, Path],
    family: str,
    dropout: float,
    gradients: list[list[Tensor]],
    device: torch.device,
) -> None:
    model = OpenedModel(directories[family])
    for checkpointing in (False, True):
        chosen = {"training__gradient_checkpointing": checkpointing, "lora__dropout": dropout}
        trained_from_start(model, 1, computing=Computing(device, torch.float32, 1), **chosen)
    for kept, again in zip(*gradients, strict=True):
        assert kept.abs().max() > 0
        torch.testing.assert_close(again, kept, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_recomputes_without_cache(llama: OpenedModel, checkpointing: bool) -> None:
    settings = settings_of(training__gradient_checkpointing=checkpointing)
    whole, parameters = adapted(llama, settings)
    caches: list[Any] = []
    attention = whole.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda _, __, given: caches.append(given.get("past_key_values")), with_kwargs=True
    )
    Loop(whole, parameters, settings.training, 7, sequences().batch, 5, 6).run(0, 2)
    assert caches == [None] * (4 if checkpointing else 2)
    assert whole.config.use_cache
    assert not any(getattr(module, "gradient_checkpointing", False) for module in whole.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_stop_at_lowest_adapter(llama: OpenedModel, checkpointing: bool) -> None:
    settings = settings_of(training__gradient_checkpointing=checkpointing, lora__layers="1")
    whole, parameters = adapted(llama, settings)
    asking: list[bool] = []
    for block in whole.model.layers:
        block.register_forward_hook(lambda _, __, output: asking.append(output.requires_grad))
    Loop(whole, parameters, settings.training, 7, sequences().batch, 5, 6).run(0, 1)
    assert asking == [False, True]


# ----- repetition ---------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_resumed_training_is_byte_identical(llama: OpenedModel, base: str) -> None:
    """Only the values and the state of the optimiser pass from the first half to the second.

    The run has dropout, a schedule and moments.
    """
    options: dict[str, Any] = {
        "lora__dropout": 0.2, "training__schedule": "cosine", "training__base": base,
        "training__weight_decay": 0.1, "training__accumulation": 2,
    }  # fmt: skip
    training = training_of(llama, **options)
    at_once, trained = training.run(start_of(training), 0, 6)
    half, first = training_of(llama, **options).run(start_of(training), 0, 3)
    resumed, second = training_of(llama, **options).run(half, 3, 3, through_a_file(first.moments))
    assert same(at_once, resumed)
    assert trained.losses == first.losses + second.losses
    forgetful, _ = training_of(llama, **options).run(half, 3, 3)
    assert not same(at_once, forgetful)


@pytest.mark.parametrize("family", CONFIGS)
def test_dropout_depends_on_seed_alone(
    directories: dict[str, Path], family: str, device: torch.device
) -> None:
    model = OpenedModel(directories[family])
    found = []
    for state, seed in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        computing = Computing(device, torch.float32, 1)
        found.append(
            trained_from_start(
                model, computing=computing, seed=seed, lora__dropout=0.2, training__batch_size=7
            )
        )
        assert torch.equal(torch.get_rng_state(), before)
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_a_loaded_model_has_no_dropout_yet(llama: OpenedModel) -> None:
    """FedSpine measures a loss before the first training step, and again after the last one."""
    settings = settings_of(lora__dropout=0.5)
    model = AdaptedModel.load(llama, CPU, settings, adapter_plan(llama.plan, settings.lora))
    # With B = 0 dropout would change nothing.
    model.set(start_of(training_of(llama)))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        once, again = (model.whole(input_ids=ids).logits for _ in range(2))
    assert torch.equal(once, again)


def test_full_epoch_ignores_seed(llama: OpenedModel) -> None:
    assert same(*(trained_from_start(llama, seed=seed, training__batch_size=7) for seed in (5, 6)))


# ----- faults -------------------------------------------------------------------------------------


def test_excessive_learning_rate_is_named(llama: OpenedModel) -> None:
    training = training_of(llama, training__learning_rate=0.1)
    start: Values = {
        key: {name: value * torch.nan for name, value in block.items()}
        for key, block in start_of(training).items()
    }
    with pytest.raises(
        EspalierError, match=r"training.learning-rate = 0.1: no step had a finite loss"
    ):
        training.run(start, 0, 3)


def test_returned_values_do_not_change_later(llama: OpenedModel) -> None:
    training = training_of(llama)
    first: tuple[Values, Trained] = training.run(start_of(training), 0, 2)
    kept = {name: value.clone() for name, value in flat(first[0]).items()}
    training.run(first[0], 2, 2, first[1].moments)
    assert all(torch.equal(value, kept[name]) for name, value in flat(first[0]).items())


def test_smaller_adapters_train_at_their_rank(llama: OpenedModel) -> None:
    settings = settings_of()
    plan: AdapterPlan = adapter_plan(llama.plan, settings.lora).limited(1)
    training = AdapterTraining(llama, CPU, settings, plan, sequences(), 5)
    found, _ = training.run(initial_adapters(plan, 3), 0, 2)
    assert {
        name: tuple(value.shape) for name, value in found["block-0001"].items() if "down" in name
    } == {
        "mlp.down.lora_a": (1, 128),
        "mlp.down.lora_b": (64, 1),
    }
