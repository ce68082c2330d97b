"""A cached model is reused as it was loaded, and only by a training that would load the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.hf.opening.opened_model import OpenedModel, opened_in
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.training.adapted_model import AdaptedModel
from espalier.training.adapter_training import AdapterTraining
from espalier.training.model_cache import forget_model, kept_model
from tests.hf.tiny_models import CPU, llama_config, save_model
from tests.training.adapters.test_adapter_training import (
    flat,
    same,
    settings_of,
    start_of,
    training_of,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("llama"),
        llama_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2),
    )


@pytest.fixture
def llama(directory: Path) -> OpenedModel:
    return opened_in(directory)


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    forget_model()
    yield
    forget_model()


def lent(model: OpenedModel, **changes: Any) -> AdaptedModel:
    settings = settings_of(**changes)
    return kept_model(model, CPU, settings, adapter_plan(model.plan, settings.lora))


def keeping(training: AdapterTraining) -> AdapterTraining:
    return replace(training, load=kept_model)


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
def test_kept_model_trains_as_a_fresh_one(llama: OpenedModel, base: str) -> None:
    options = {
        "training__base": base,
        "lora__dropout": 0.3,
        "training__gradient_checkpointing": True,
    }
    fresh = training_of(llama, **options)
    expected, _ = fresh.run(start_of(fresh), 0, 3)
    for _ in range(3):
        again = keeping(training_of(llama, **options))
        found, _ = again.run(start_of(again), 0, 3)
        assert same(found, expected)


def test_a_kept_model_is_lent_as_it_was_loaded(llama: OpenedModel) -> None:
    first = lent(llama)
    whole = first.whole
    before = first.values()
    base = {
        name: value.detach().clone()
        for name, value in whole.named_parameters()
        if not value.requires_grad
    }
    training = keeping(training_of(llama))
    training.run(start_of(training), 0, 3)
    for parameter in flat(training.adapted.parameters).values():
        # Freeze the parameters, as a method with frozen adapters does.
        parameter.requires_grad_(False)
    again = lent(llama)
    assert again.whole is whole
    assert same(again.values(), before)
    assert all(
        parameter.requires_grad and parameter.grad is None
        for parameter in flat(again.parameters).values()
    )
    assert not whole.training
    assert all(torch.equal(whole.get_parameter(name), value) for name, value in base.items())


def test_additions_are_not_lent_to_the_next_user(llama: OpenedModel) -> None:
    first, *_ = lent(llama).parameters
    lent(llama).parameters[first]["own"] = torch.nn.Parameter(torch.zeros(1))
    lent(llama).parameters["base"] = {"own": torch.nn.Parameter(torch.zeros(1))}
    assert "own" not in lent(llama).parameters[first]
    assert "base" not in lent(llama).parameters


@pytest.mark.parametrize(
    "changes",
    [{"lora__rank": 3}, {"lora__dropout": 0.5}, {"training__base": "bfloat16"}, {"seed": 1}],
)
def test_other_settings_replace_the_model(llama: OpenedModel, changes: dict[str, Any]) -> None:
    whole = lent(llama).whole
    assert lent(llama).whole is whole
    assert lent(llama, **changes).whole is not whole
    # At most one model is cached.
    assert lent(llama).whole is not whole


def test_changed_files_are_loaded_anew(tmp_path: Path) -> None:
    save_model(tmp_path, llama_config())
    settings = settings_of()

    def found() -> AdaptedModel:
        return kept_model(opened_in(tmp_path), CPU, settings, AdapterPlan({}))

    before = found()
    assert found().whole is before.whole
    (tmp_path / "model.safetensors").unlink()
    save_model(tmp_path, llama_config(initializer_range=0.5))
    after = found()
    assert after.whole is not before.whole
    assert not torch.equal(after.whole.lm_head.weight, before.whole.lm_head.weight)


def test_threads_do_not_share_a_model(llama: OpenedModel) -> None:
    here = lent(llama)
    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(lent, llama).result().whole is not here.whole
