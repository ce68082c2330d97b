"""Training sequences and scored requests of the task ``chat``."""

from collections.abc import Sequence
from typing import Any

from espalier.data.tasks.encoding import Encoded, Marked
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import ScoredItems, cut_written
from espalier.data.token_pieces import common_beginning
from espalier.errors import InputError
from espalier.progress import with_progress
from espalier.settings.tables.task import CHAT_TEMPLATES, NO_TEMPLATE, TaskSettings


def template_of(task: TaskSettings) -> str | None:
    """Return the Jinja template that the settings name; None: the tokenizer's own."""
    return CHAT_TEMPLATES.get(task.chat_template)


def chat_sequences(model: Any, item: Item, template: str | None) -> list[Marked]:
    """Return the training sequences of an item.

    Parameters
    ----------
    model : ``OpenedModel`` with the tokenizer
    template : Jinja template; None: the tokenizer's own

    Raises
    ------
    InputError
        The template refuses the conversation; the message names the record.
    """
    chat = item.conversation
    if chat is None:
        return [_completion(model.tokenizer, item)]
    try:
        found = model.encode_chat(chat.messages, chat.first, template)
    except InputError as error:
        # No record can mend a model without a template.
        raise (error if NO_TEMPLATE in str(error) else error.at(item.where)) from None
    return [Marked(one.token_ids, one.spans) for one in found]


def _completion(tokenizer: Any, item: Item) -> Marked:
    """Return a plain prompt with its completion, as TRL encodes them.

    The completion begins where the tokens of both differ from those of the prompt, and an
    end-of-text token follows it.
    """
    whole = list(tokenizer.encode(item.prompt + item.gold))
    prompt = list(tokenizer.encode(item.prompt))
    end = tokenizer.eos_token_id
    if end is not None and whole[-1:] != [end]:
        whole.append(end)
    start = common_beginning(prompt, whole)
    return Marked(tuple(whole), ((start, len(whole)),))


def chat_items(
    items: Sequence[Item], model: Any, template: str | None, max_tokens: int
) -> ScoredItems:
    """Encode conversations as test items: one for each answer, with all that stands before it.

    An item that is longer than ``max_tokens`` loses its beginning, and an answer that leaves no
    room for anything before it loses its end.
    """
    requests = [
        # A first token has no loss: nothing before it predicts it.
        Encoded(one.token_ids[:end], end - max(start, 1))
        for item in with_progress(items, "tokenising test items")
        for one in chat_sequences(model, item, template)
        for start, end in one.spans
        if end > max(start, 1)
    ]
    cuts = [cut_written(one, max_tokens) for one in requests]
    number = len(requests)
    lost = tuple(place for place in range(number) if requests[place] != cuts[place])
    return ScoredItems(tuple(cuts), (1,) * number, (0,) * number, (1,) * number, lost)
