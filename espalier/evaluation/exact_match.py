"""Exact match: is the answer that a language model writes the right one?

As lm-evaluation-harness 0.4.13 computes ``exact_match`` for gsm8k without examples in the prompt.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.corpora.special_tokens import prompt_encoder
from espalier.corpora.tasks.item import Item
from espalier.corpora.tasks.task import Generation
from espalier.pace.beats import beats
from espalier.settings.mistakes import Mistake

NOT_FOUND = "[invalid]"
"""What stands for an answer in which a pattern matches nothing."""


class _Stopped:
    """Which texts of a batch have just come to a stop string; their last tokens alone are looked at."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._prompt_tokens = prompt_tokens
        # Two tokens more than the longest stop string has: it may have been written with other tokens.
        self._look_back = 2 + max(
            len(tokenizer.encode(word, add_special_tokens=False)) for word in stop
        )

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        tails = self._tokenizer.batch_decode(
            input_ids[:, self._prompt_tokens :][:, -self._look_back :]
        )
        return torch.tensor(
            [any(word in tail for word in self._stop) for tail in tails], device=input_ids.device
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
    """What a model writes after each prompt, taking the likeliest token every time, up to the first stop string.

    Prompts of about one length go through the model together, padded on the left, without the tokens that the tokenizer adds
    behind a text: the answer is to follow. A prompt that leaves no room for
    ``how.max_new_tokens`` loses tokens at its beginning.

    Parameters
    ----------
    model : one of Hugging Face's with ``generate``, in evaluation mode
    tokenizer : its tokenizer, with a token for the end of a text
    max_tokens : how many tokens the model takes

    Raises
    ------
    Mistake
        The model takes no more tokens than it is to write.
    """
    room = _room(how, max_tokens)
    encode = prompt_encoder(tokenizer)
    encoded = [encode(prompt)[-room:] for prompt in prompts]
    stop = (*how.stop, tokenizer.eos_token)
    written = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda place: -len(encoded[place]))
    for start in beats(range(0, len(order), batch_size), "writing batch"):
        places = order[start : start + batch_size]
        input_ids, attention_mask = _padded_on_the_left(
            [encoded[place] for place in places], tokenizer.eos_token_id
        )
        tokens = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            max_new_tokens=how.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            stopping_criteria=[_Stopped(tokenizer, stop, input_ids.shape[1])],
        )
        for place, row in zip(places, tokens[:, input_ids.shape[1] :], strict=True):
            written[place] = _up_to(stop, tokenizer.decode(row, skip_special_tokens=True))
    return written


def shortened(tokenizer: Any, prompts: Sequence[str], how: Generation, max_tokens: int) -> set[int]:
    """Which prompts lose tokens in ``generate``; it raises as that does."""
    room = _room(how, max_tokens)
    encode = prompt_encoder(tokenizer)
    return {place for place, prompt in enumerate(prompts) if len(encode(prompt)) > room}


def _room(how: Generation, max_tokens: int) -> int:
    """Tokens that a prompt may have."""
    if (room := max_tokens - how.max_new_tokens) < 1:
        raise Mistake(
            f"the model takes {max_tokens} tokens, and an answer may have {how.max_new_tokens},"
            " which leaves none for the prompt; lower task.answer-tokens, or take a model that"
            " takes more"
        )
    return room


def _padded_on_the_left(rows: Sequence[Sequence[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (B, T), int64."""
    length = max(map(len, rows))
    input_ids = torch.tensor([[pad_token] * (length - len(row)) + list(row) for row in rows])
    attention_mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return input_ids, attention_mask


def _up_to(stop: Sequence[str], text: str) -> str:
    for word in stop:
        text = text.split(word)[0]
    return text


def found_answers(texts: Sequence[str], how: Generation) -> dict[str, list[str]]:
    """By pattern, the answer that each text gives; ``NOT_FOUND`` where the pattern matches nothing."""
    return {
        name: [_found(text, pattern, which) for text in texts]
        for name, pattern, which in how.patterns
    }


def _found(text: str, pattern: Any, which: int) -> str:
    matches = list(pattern.finditer(text))
    if not matches:
        return NOT_FOUND
    return next((group for group in matches[which].groups() if group), NOT_FOUND).strip()


def exact_match(texts: Sequence[str], items: Sequence[Item], how: Generation) -> dict[str, float]:
    """By pattern, the share of the items, of which there is at least one, that a text answers rightly.

    Answers are compared without what ``how.ignored`` matches, and without regard to capitals.
    """
    true = [_plain(item.gold, how) for item in items]
    return {
        name: (
            sum(_plain(one, how) == right for one, right in zip(found, true, strict=True))
            / len(items)
        )
        for name, found in found_answers(texts, how).items()
    }


def _plain(answer: str, how: Generation) -> str:
    for pattern in how.ignored:
        answer = pattern.sub("", answer)
    return answer.lower()
