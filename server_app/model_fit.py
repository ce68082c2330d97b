"""Whether a run fits its model: found out at the server, before there is a run directory and before a client works."""

from collections.abc import Mapping

from espalier.corpora.special_tokens import prompt_encoder
from espalier.corpora.tasks.catalogue import task_named
from espalier.modeling.base_check import (
    require_finite_weights,
    require_same_encoder,
    require_same_logits,
)
from espalier.modeling.computing import Computing
from espalier.modeling.opened import OpenedModel
from espalier.modeling.tokenizer_rules import require_known_tokenizer
from espalier.settings.libraries import require_libraries
from espalier.settings.methods import METHODS, part
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from server_app.public_tests import PublicTests
from strategies.methods.fleet_time import fleet_of_run

A_FEW = 2
"""Windows of a public text on which the base model is compared."""


def require_fit(
    settings: RunSettings,
    model: OpenedModel,
    tests: PublicTests,
    capabilities: Mapping[str, float],
    *,
    simulation: bool,
) -> None:
    """Refuse a run that every client would fail in, or the server at its end.

    Parameters
    ----------
    capabilities : of the clients, by name, as far as they are known beforehand

    Raises
    ------
    Mistake
        A library is missing that the settings need; the method says why it cannot work on the model; the fleet that the run
        pretends to have is not there, or too small; prompts and the answers that the model is to write are longer than it
        takes; or real sites, which are brought the model, would not take its tokenizer.
    """
    require_libraries(settings)
    part(METHODS[settings.method].strategy).require_fit(settings, model, capabilities)
    if not (simulation or settings.job.NEEDS_BASE_MODEL):  # sites will be brought its tokenizer
        require_known_tokenizer(model.directory)
    fleet_of_run(settings, simulation=simulation)
    if (
        settings.evaluation.every
        and not part(METHODS[settings.method].outcome).MEASURED_BETWEEN_ROUNDS
    ):
        raise Mistake(
            f"evaluation.every = {settings.evaluation.every}: {settings.method} is measured at the"
            " end alone; set it to 0"
        )
    if (
        settings.tunes
        and settings.task.name != TEXT
        and task_named(settings.task.name).generation
        and tests.items
    ):
        _require_room_for_answers(settings, model, tests)


def require_sound_base(model: OpenedModel, computing: Computing, tests: PublicTests) -> None:
    """Refuse a base model that plain transformers reads otherwise, or that is not finite, before a client works with it.

    Raises
    ------
    Mistake
        It names the tensor, or what differs.
    """
    labels = tests.num_classes or None
    require_finite_weights(model, computing, labels)
    if labels is not None:
        require_same_encoder(model, computing, labels)
    else:
        require_same_logits(model, computing, next(iter(tests.texts.values()))[:A_FEW])


def _require_room_for_answers(
    settings: RunSettings, model: OpenedModel, tests: PublicTests
) -> None:
    if model.tokenizer.eos_token_id is None:
        raise Mistake(
            f"{model.directory}: the tokenizer has no token that ends a text, and answers of the"
            f" task {settings.task.name} end with it; name one as eos_token in"
            " tokenizer_config.json, or leave task.test-path empty"
        )
    encode = prompt_encoder(model.tokenizer)
    prompt = max(len(encode(item.prompt)) for item in tests.items)
    wanted = settings.task.answer_tokens
    positions = model.num_positions
    if positions is None or prompt + wanted <= positions:
        return
    remedy = (
        f"set it to {positions - prompt} or less"
        if prompt < positions
        else "leave out items with prompts that long"
    )
    raise Mistake(
        f"task.answer-tokens = {wanted}: behind the longest prompt of the test items, {prompt}"
        f" tokens, that makes {prompt + wanted}, and the model has {positions} positions; {remedy}"
    )
