"""Exact match: the fraction of written answers that are correct.

It is computed as ``exact_match`` of lm-evaluation-harness 0.4.13 for gsm8k without examples in the
prompt.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data.tasks.encoding import prompt_encoder
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Generation
from espalier.errors import InputError
from espalier.progress import report_each

NOT_FOUND = "[invalid]"
"""Placeholder for an answer in which a pattern has no match."""


class _Stopped:
    """Stopping criterion: texts whose last tokens contain a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._prompt_tokens = prompt_tokens
        # Two tokens more than the longest stop string: the model may write it with other tokens.
        self._look_back = 2 + max(
            len(tokenizer.encode(string, add_special_tokens=False)) for string in stop
        )

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        tails = self._tokenizer.batch_decode(
            input_ids[:, self._prompt_tokens :][:, -self._look_back :]
        )
        return torch.tensor(
            [any(string in tail for string in self._stop) for tail in tails],
            device=input_ids.device,
        )


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    how: Generation,
    max_tokens: int,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
) -> list[str]:
    """Generate text for each prompt with greedy decoding, up to the first stop string.

    Prompts of similar length form a batch, padded on the left. Tokens that the tokenizer adds after
    a text are left out, because the answer follows. A prompt that leaves no room for
    ``how.max_new_tokens`` loses tokens at its beginning. Raises InputError if ``max_tokens`` is not
    larger than ``how.max_new_tokens``.

    Parameters
    ----------
    model : model of Hugging Face with ``generate``, in evaluation mode
    tokenizer : its tokenizer, with an end-of-text token
    max_tokens : maximum number of tokens of the model
    """
    room = _room(how, max_tokens)
    encode = prompt_encoder(tokenizer)
    encoded = [encode(prompt)[-room:] for prompt in prompts]
    stop = (*how.stop, tokenizer.eos_token)
    written = [""] * len(prompts)
    # Longest prompts first, so that a batch has little padding and memory is highest at the start.
    order = sorted(range(len(prompts)), key=lambda index: -len(encoded[index]))
    for start in report_each(range(0, len(order), batch_size), "writing batch"):
        indices = order[start : start + batch_size]
        rows = [torch.tensor(encoded[index], dtype=torch.int64) for index in indices]
        input_ids = _padded_on_the_left(rows, tokenizer.eos_token_id)
        attention_mask = _padded_on_the_left([torch.ones_like(row) for row in rows], 0)
        tokens = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            max_new_tokens=how.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            stopping_criteria=[_Stopped(tokenizer, stop, input_ids.shape[1])],
        )
        for index, row in zip(indices, tokens[:, input_ids.shape[1] :], strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            for string in stop:
                text = text.split(string)[0]
            written[index] = text
    return written


def shortened(tokenizer: Any, prompts: Sequence[str], how: Generation, max_tokens: int) -> set[int]:
    """Return the indices of prompts that lose tokens in ``generate``, with its errors."""
    room = _room(how, max_tokens)
    encode = prompt_encoder(tokenizer)
    return {index for index, prompt in enumerate(prompts) if len(encode(prompt)) > room}


def _room(how: Generation, max_tokens: int) -> int:
    """Return the maximum number of tokens of a prompt."""
    if (room := max_tokens - how.max_new_tokens) < 1:
        raise InputError(
            f"the model accepts {max_tokens} tokens and an answer may have {how.max_new_tokens},"
            " so no token is left for the prompt; lower task.answer-tokens, or use a model that"
            " accepts more tokens"
        )
    return room


def _padded_on_the_left(rows: list[Tensor], padding: int) -> Tensor:
    """Return rows of int64 as one tensor (B, T)."""
    return nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=padding, padding_side="left"
    )


def found_answers(texts: Sequence[str], how: Generation) -> dict[str, list[str]]:
    """Return each text's answer by pattern; ``NOT_FOUND`` if the pattern has no match."""
    answers = {}
    for name, pattern, which in how.patterns:
        text_answers = []
        for text in texts:
            matches = list(pattern.finditer(text))
            groups = matches[which].groups() if matches else ()
            text_answers.append(next((group for group in groups if group), NOT_FOUND).strip())
        answers[name] = text_answers
    return answers


def exact_match(texts: Sequence[str], items: Sequence[Item], how: Generation) -> dict[str, float]:
    """Return, by pattern, the fraction of items, at least one, that are answered correctly.

    Answers are compared without the matches of ``how.ignored`` and without regard to case.
    """
    gold = [_plain(item.gold, how) for item in items]
    return {
        name: (
            sum(
                _plain(answer, how) == expected
                for answer, expected in zip(answers, gold, strict=True)
            )
            / len(items)
        )
        for name, answers in found_answers(texts, how).items()
    }


def _plain(answer: str, how: Generation) -> str:
    for pattern in how.ignored:
        answer = pattern.sub("", answer)
    return answer.lower()
