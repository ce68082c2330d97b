"""Scores of models on a task's public items, next to the scores of a model at chance level."""

import sys
from dataclasses import replace

from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.task import Generation
from espalier.evaluation.exact_match import exact_match, generate, shortened
from espalier.evaluation.scores import chance_of_options, majority_share, score, uniform_loss
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import RunSettings
from espalier.training.adapted_model import AdaptedModel
from server_app.public_tests import PublicTests
from strategies.base.run import Run


def scores_of(run: Run, adapted: AdaptedModel, tests: PublicTests) -> dict[str, float]:
    """Return a model's scores on the items, by metric."""
    assert tests.encoded is not None
    size = run.settings.training.batch_size
    device = run.computing.device
    all_scores = score(adapted.whole, tests.encoded, tests.num_classes > 0, size, device)
    scores = {metric: all_scores[metric] for metric in tests.metrics}
    if (how := _writing(run.settings, tests)) is not None:
        prompts = [item.prompt for item in tests.items]
        limit = run.model.num_positions or sys.maxsize
        written = generate(adapted.whole, run.model.tokenizer, prompts, how, limit, size, device)
        scores |= exact_match(written, tests.items, how)
    return scores


def _writing(settings: RunSettings, tests: PublicTests) -> Generation | None:
    """Return the settings of generated answers; None if the task has none."""
    how = task_of(settings).generation
    if how is None or tests.num_classes:
        return None
    return replace(how, max_new_tokens=settings.task.answer_tokens)


def num_cut(settings: RunSettings, model: OpenedModel, tests: PublicTests) -> int:
    """Return the number of items that are too long and lose tokens.

    An item counts if its text with the answer is too long, or its prompt for a generated answer.
    """
    assert tests.encoded is not None
    lost = set(tests.encoded.cut)
    if (how := _writing(settings, tests)) is not None:
        prompts = [item.prompt for item in tests.items]
        lost |= shortened(model.tokenizer, prompts, how, model.num_positions or sys.maxsize)
    return len(lost)


def chance(run: Run, tests: PublicTests, metric: str) -> float:
    """Return the score at chance level on the items."""
    if metric == "loss":
        return uniform_loss(tests.num_classes or len(run.model.tokenizer))
    if not metric.startswith("acc"):
        return 0.0
    task = task_of(run.settings)
    return majority_share(tests.items) if task.classes else chance_of_options(tests.items)
