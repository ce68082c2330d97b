"""Token ids of conversations, rendered by a chat template, with the places of assistant tokens.

Token ids and places equal those of TRL 1.16 (``SFTTrainer`` with ``assistant_only_loss``) where TRL
supports the template. TRL needs a template with ``{% generation %}`` for this. Other templates are
rendered once more up to each assistant message, which shows where it begins and ends.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from espalier.errors import InputError
from espalier.settings.tables.task import NO_TEMPLATE

Message = tuple[str, str]
"""Role and content."""


class ChatTokens(NamedTuple):
    """Token ids of a rendered conversation."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """Start and end of each stretch of assistant tokens, in order."""


_DATE = {"%d": "26", "%m": "07", "%b": "Jul", "%B": "July", "%y": "24", "%Y": "2024"}
"""Date of templates that write today's, so that a run can be repeated; Llama 3.1's own default."""
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f".replace('{sign}', '{text}')" for sign, text in _DATE.items())
    + " -}}{%- endmacro -%}"
)
"""Definition, in Jinja, of the function that templates call for the date."""
END_CHARACTERS = 8
"""Number of characters at the end of an answer that every template must keep."""
_REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], first: int, template: str | None
) -> list[ChatTokens]:
    """Return the training sequences of a conversation.

    It is one sequence, unless the template renders an assistant message otherwise when further
    messages follow it, as those that leave out earlier reasoning do. Then each assistant message
    ends a sequence of its own, as it does when a model writes it. Raises InputError if the template
    refuses the conversation or does not render its assistant messages.

    Parameters
    ----------
    tokenizer : tokenizer of Hugging Face, or one in another process
    messages : role and content of each message
    first : index of the first message that may have a loss
    template : Jinja template; None: the tokenizer's own
    """
    if remote := getattr(tokenizer, "encode_chat", None):
        sequences: list[ChatTokens] = remote(messages, first, template)
        return sequences
    template = template or tokenizer.chat_template
    # Several named templates: the default one.
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise InputError(
            f"{NO_TEMPLATE}; set task.chat-template = 'chatml', or give"
            " records with a plain prompt and completion"
        )
    # A fixed date, so that every run and every site renders the same text.
    if "strftime_now" in template:
        template = _FIXED_DATE + template
    # The template itself says which tokens the assistant writes.
    if _MARKS.search(template):
        found = [_marked_by_template(tokenizer, messages, first, template)]
    else:
        found = _compared(tokenizer, messages, first, template)
    if not all(one.spans for one in found):
        raise InputError(
            "the chat template leaves out an assistant message; set task.chat-template, or use"
            " another model"
        )
    return found


def _compared(
    tokenizer: Any, messages: Sequence[Message], first: int, template: str
) -> list[ChatTokens]:
    """Return the sequences for a template that does not mark what the assistant writes."""
    # The texts up to each message are rendered and compared with the whole.
    rendered = _render(tokenizer, messages, template)
    turns = list(_turns(tokenizer, messages, first, template))
    for answer, (prompt, text) in zip(_answers(messages, first), turns, strict=True):
        _require_kept(answer, text.removeprefix(prompt))
    ends = [_end_within(rendered, text, tokenizer.eos_token or "") for _, text in turns]
    # The template renders a message alike, whatever follows: one sequence for all.
    if all(ends) and all(rendered.startswith(prompt) for prompt, _ in turns):
        starts = (len(prompt) for prompt, _ in turns)
        return [_tokens(tokenizer, rendered, list(zip(starts, ends, strict=True)))]
    # Otherwise each message ends a sequence, as it does when the model writes it.
    if all(text.startswith(prompt) for prompt, text in turns):
        return [_tokens(tokenizer, text, [(len(prompt), len(text))]) for prompt, text in turns]
    raise InputError(
        "the chat template writes an assistant message otherwise than its prompt lets the model"
        " begin it; set task.chat-template, or use another model"
    )


def _answers(messages: Sequence[Message], first: int) -> list[str]:
    """Return the contents of the assistant messages that may have a loss."""
    return [content for role, content in messages[first:] if role == "assistant"]


def _require_kept(answer: str, rendered: str) -> None:
    """Refuse a template that leaves out the text of an answer.

    Templates change white space and leave out reasoning, but keep the end of what is said.
    """
    said = _REASONING.sub("", answer)
    if _squeezed(said)[-END_CHARACTERS:] not in _squeezed(rendered):
        raise InputError(
            "the chat template leaves out text of an assistant message (it may read content as a"
            " list of parts only, or take what stands before a tag for reasoning); set"
            " task.chat-template, use another model, or remove the record"
        )


def _squeezed(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def _end_within(rendered: str, text: str, end_of_text: str) -> int:
    """Return where a rendered beginning ends within the whole conversation; 0 if it does not.

    A template may close every text with an end-of-text token.
    """
    if text != rendered and end_of_text and not rendered.startswith(text):
        text = text.removesuffix(end_of_text)
    return len(text) if rendered.startswith(text) else 0


def _turns(
    tokenizer: Any, messages: Sequence[Message], first: int, template: str
) -> Iterator[tuple[str, str]]:
    """Yield the rendered prompt of each assistant message, and the text up to the message's end."""
    for position, (role, _) in enumerate(messages):
        if role == "assistant" and position >= first:
            yield (
                _render(tokenizer, messages[:position], template, prompt=True),
                _render(tokenizer, messages[: position + 1], template),
            )


def _marked_by_template(
    tokenizer: Any, messages: Sequence[Message], first: int, template: str
) -> ChatTokens:
    """Return the tokens with the places that the template marks."""
    encoded = _applied(
        tokenizer, messages, template, tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True
    )  # fmt: skip
    ids = tuple(encoded["input_ids"])
    if first:
        prompt = _applied(
            tokenizer, messages[:first], template, tokenize=True, return_dict=True,
            add_generation_prompt=True
        )["input_ids"]  # fmt: skip
        start = common_prefix(prompt, ids)
    else:
        start = 0
    # Messages before ``first`` have no loss.
    mask = [0] * start + list(encoded["assistant_masks"])[start:]
    spans = _stretches(mask)
    if spans:
        written = "".join(tokenizer.decode(ids[begin:end]) for begin, end in spans)
        for answer in _answers(messages, first):
            _require_kept(answer, written)
    return ChatTokens(ids, spans)


def _stretches(mask: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return start and end of each stretch of ones."""
    edges = [
        position
        for position, (previous, current) in enumerate(zip([0, *mask], [*mask, 0], strict=True))
        if previous != current
    ]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _tokens(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> ChatTokens:
    """Return the tokens of a rendered text; those that overlap a span of characters have a loss."""
    # Slow tokenizers have no offsets.
    if not tokenizer.is_fast:
        return _tokens_by_prefix(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [0] * len(encoded["input_ids"])
    for position, (start, end) in enumerate(encoded["offset_mapping"]):
        # A token that overlaps a span counts as written by the assistant.
        mask[position] = int(
            any(start < span_end and end > span_start for span_start, span_end in spans)
        )
    return ChatTokens(tuple(encoded["input_ids"]), _stretches(mask))


def _tokens_by_prefix(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> ChatTokens:
    """Return the same for a tokenizer without offsets, by the tokens of what stands before."""

    def ids(part: str) -> list[int]:
        token_ids: list[int] = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    all_ids = ids(text)
    token_spans = (
        # Tokens of a beginning can differ at its end, where a token may be merged with what
        # follows.
        (common_prefix(ids(text[:start]), all_ids), common_prefix(ids(text[:end]), all_ids))
        for start, end in spans
    )
    return ChatTokens(tuple(all_ids), tuple(token_spans))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens that two sequences have in common."""
    pairs = zip(one, other, strict=False)
    return next(
        (position for position, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))
    )


def _render(
    tokenizer: Any, messages: Sequence[Message], template: str, *, prompt: bool = False
) -> str:
    text: str = _applied(
        tokenizer, messages, template, tokenize=False, add_generation_prompt=prompt
    )
    return text


def _applied(tokenizer: Any, messages: Sequence[Message], template: str, **options: Any) -> Any:
    """Apply a chat template; its errors name the reason but no message."""
    from jinja2 import TemplateError

    rows = [{"role": role, "content": content} for role, content in messages]
    try:
        return tokenizer.apply_chat_template(rows, chat_template=template, **options)
    except TemplateError as error:
        # Only a text of the template itself cannot contain any of the conversation.
        reason = str(error) if str(error) in template else type(error).__name__
        reason = "".join(sign if sign.isprintable() else " " for sign in reason)[:200]
        raise InputError(
            f"the chat template refuses a conversation: {reason}; change the record, or set"
            " task.chat-template"
        ) from None
    # A template may fail like any program.
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise InputError(
            f"the chat template fails on a conversation ({type(error).__name__}); change the"
            " record, or set task.chat-template"
        ) from None
