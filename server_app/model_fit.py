"""Check at the server that a run suits its model, before there is a run directory."""

from collections.abc import Mapping

from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.encoding import prompt_encoder
from espalier.errors import InputError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.base_check import (
    require_finite_weights,
    require_same_encoder,
    require_same_logits,
)
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.tokenizer.rules import require_known_tokenizer
from espalier.settings.libraries import require_libraries
from espalier.settings.registry import METHODS
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT
from server_app.public_tests import PublicTests
from strategies.base.method import require_fit as require_method_fit
from strategies.fleet import fleet_of_run

A_FEW = 2
"""Number of evaluation sequences for the comparison of the base model with transformers."""


def require_fit(
    settings: RunSettings,
    model: OpenedModel,
    tests: PublicTests,
    capabilities: Mapping[str, float],
    *,
    simulation: bool,
) -> None:
    """Raise InputError if every client would fail in this run, or the server at its end.

    Parameters
    ----------
    capabilities : known capabilities of clients, by name

    Raises
    ------
    InputError
        A library that the settings need is missing; the method cannot work on the model; the
        simulated fleet does not exist or is too small; prompts plus generated answers are longer
        than the model accepts; or real sites, which receive the model, would not accept its
        tokenizer.
    """
    require_libraries(settings)
    require_method_fit(settings, model, capabilities)
    # The server pushes this tokenizer to the sites, which accept known types only.
    if not (simulation or settings.job.NEEDS_BASE_MODEL):
        require_known_tokenizer(model.directory)
    fleet_of_run(settings, simulation=simulation)
    if settings.tunes and settings.task.name != TEXT and settings.task.packing:
        _require_packing(model)
    if settings.evaluation.every and not METHODS[settings.method].measured_by_round:
        raise InputError(
            f"evaluation.every = {settings.evaluation.every}: {settings.method} is evaluated"
            " only at the end; set it to 0"
        )
    if (
        settings.tunes
        and settings.task.name != TEXT
        and task_of(settings).generation
        and tests.items
    ):
        _require_room_for_answers(settings, model, tests)


def require_sound_base(model: OpenedModel, computing: Computing, tests: PublicTests) -> None:
    """Raise InputError if the base model is not finite, or differs from plain transformers.

    Raises
    ------
    InputError
        The message names the tensor, or the difference.
    """
    labels = tests.num_classes or None
    require_finite_weights(model, computing, labels)
    if labels is not None:
        require_same_encoder(model, computing, labels)
    else:
        require_same_logits(model, computing, next(iter(tests.texts.values()))[:A_FEW])


def _require_packing(model: OpenedModel) -> None:
    """Raise InputError unless the model can attend within the records of a packed row only."""
    if not model.family.packs or model.family.kind == "encoder":
        raise InputError(
            f"task.packing = true: models of the family {model.family.name} do not separate packed"
            " records; leave it out"
        )


def _require_room_for_answers(
    settings: RunSettings, model: OpenedModel, tests: PublicTests
) -> None:
    if model.tokenizer.eos_token_id is None:
        raise InputError(
            f"{model.directory}: the tokenizer has no end-of-text token, with which answers of"
            f" the task {settings.task.name} end; set eos_token in tokenizer_config.json, or"
            " leave task.test-path empty"
        )
    encode = prompt_encoder(model.tokenizer)
    prompt = max(len(encode(item.prompt)) for item in tests.items)
    answer = settings.task.answer_tokens
    positions = model.num_positions
    if positions is None or prompt + answer <= positions:
        return
    remedy = (
        f"set it to {positions - prompt} or less"
        if prompt < positions
        else "remove items with prompts this long"
    )
    raise InputError(
        f"task.answer-tokens = {answer}: with the longest prompt of the test items ({prompt}"
        f" tokens) this makes {prompt + answer} tokens, but the model has {positions} positions;"
        f" {remedy}"
    )
