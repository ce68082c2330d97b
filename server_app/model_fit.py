"""Whether a run fits its model: found out at the server, before there is a run directory and before a client works."""

from espalier.corpora.tasks.catalogue import task_named
from espalier.modeling.opened import OpenedModel
from espalier.modeling.quantised import require_quantisable
from espalier.settings.libraries import require_libraries
from espalier.settings.mistakes import Mistake
from espalier.settings.run import METHODS, RunSettings
from espalier.settings.task import TEXT
from espalier.wire.tuning import trained
from server_app.public_tests import PublicTests
from strategies.methods.pattern_fit import require_pattern_fits


def require_fit(settings: RunSettings, model: OpenedModel, tests: PublicTests) -> None:
    """Refuse a run that every client would fail in, or the server at its end.

    Raises
    ------
    Mistake
        A pattern does not divide the rows of a matrix, a library is not installed, ``[lora]`` describes adapters that the
        model cannot have, a matrix cannot be quantised, or prompts and the answers that the model is to write are longer than
        it takes.
    """
    if settings.method == "fedprllm":
        require_pattern_fits(model.plan, "fedprllm", settings.fedprllm)
    if settings.method == "fedspallm":
        require_pattern_fits(model.plan, "fedspallm", settings.fedspallm)
    if "task" not in METHODS[settings.method]:
        return
    require_libraries(settings)
    trained(model.plan, settings)
    if settings.training.base == "nf4":
        require_quantisable(model.plan)
    if settings.task.name != TEXT and task_named(settings.task.name).generation and tests.items:
        _require_room_for_answers(settings, model, tests)


def _require_room_for_answers(settings: RunSettings, model: OpenedModel, tests: PublicTests) -> None:
    if model.tokenizer.eos_token_id is None:
        raise Mistake(
            f"{model.directory}: the tokenizer has no token that ends a text, and answers of the task {settings.task.name} end "
            "with it; name one as eos_token in tokenizer_config.json, or leave task.test-path empty"
        )
    prompt = max(len(model.tokenizer.encode(item.prompt)) for item in tests.items)
    wanted, positions = settings.task.answer_tokens, model.num_positions
    if positions is None or prompt + wanted <= positions:
        return
    remedy = f"set it to {positions - prompt} or less" if prompt < positions else "leave out items with prompts that long"
    raise Mistake(
        f"task.answer-tokens = {wanted}: behind the longest prompt of the test items, {prompt} tokens, that makes "
        f"{prompt + wanted}, and the model has {positions} positions; {remedy}"
    )
