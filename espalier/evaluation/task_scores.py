"""All scores of a language model on a task, each beside its level of chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from espalier.corpora.tasks.encoding import encode_items
from espalier.corpora.tasks.item import Item
from espalier.corpora.tasks.task import Task
from espalier.evaluation.answer_loss import mean_answer_loss
from espalier.evaluation.chance import chance_of_options, majority_share, uniform_loss
from espalier.evaluation.exact_match import exact_match, generate
from espalier.evaluation.options import option_accuracy, option_log_likelihoods
from espalier.settings.mistakes import Mistake


@dataclass(frozen=True)
class Score:
    """A score, and what a model reaches that has learnt nothing."""

    value: float
    chance: float


def task_scores(
    model: Any,
    tokenizer: Any,
    task: Task,
    items: Sequence[Item],
    max_tokens: int,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
) -> dict[str, Score]:
    """Scores by name: the task's metrics, and in place of ``exact_match`` one per pattern of the task's ``generation``.

    Parameters
    ----------
    model : a causal model of Hugging Face's, in evaluation mode
    tokenizer : its tokenizer
    max_tokens : how many tokens the model takes

    Raises
    ------
    Mistake
        There are no items, or an answer is too long for the model.
    """
    if not items:
        raise Mistake(f"task {task.name}: there are no items to score; name a file or split that has some")
    scores: dict[str, Score] = {}
    if "acc" in task.metrics:
        found = option_log_likelihoods(model, tokenizer.encode, items, max_tokens, batch_size, device)
        chance = majority_share(items) if task.classes else chance_of_options(items)
        scores |= {
            metric: Score(option_accuracy(items, found, metric), chance) for metric in task.metrics if metric.startswith("acc")
        }
    if task.generation:
        prompts = [item.prompt for item in items]
        written = generate(model, tokenizer, prompts, task.generation, max_tokens, batch_size, device)
        scores |= {name: Score(value, 0.0) for name, value in exact_match(written, items, task.generation).items()}
    if "loss" in task.metrics:
        encoded = encode_items(items, tokenizer.encode, max_tokens)
        loss, _ = mean_answer_loss(model, encoded, batch_size=batch_size, device=device)
        scores["loss"] = Score(loss, uniform_loss(len(tokenizer)))
    return scores
