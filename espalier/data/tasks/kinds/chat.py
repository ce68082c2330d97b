"""Task ``chat``: conversations, with a loss on assistant messages only.

Three forms of records are read, with the conventions of TRL 1.16:

- ``messages``: role and content of each message, as in OpenAI's API
- ``conversations``: ``from`` and ``value`` of each message, as in ShareGPT
- ``prompt`` and ``completion``: two texts, which are not rendered by a template, or two lists of
  messages
"""

from collections.abc import Sequence

from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Conversation, Item
from espalier.data.tasks.task import Hub, Task
from espalier.settings.tables.task import CHAT

ROLES = ("system", "developer", "user", "assistant", "tool")
REMOVE = "remove the record"
OTHER_INPUTS = ("tools", "functions", "documents", "chat_template_kwargs")
"""Fields besides the messages that chat templates can read."""
FORMS = {
    "messages": "messages",
    "conversations": "conversations",
    "prompt": "prompt",
    "completion": "prompt",
}
"""Form of a record for each field that tells it."""
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
"""Role for each name of a speaker that ShareGPT's records use in addition to ``ROLES``."""


def _chat(record: Fields) -> Item:
    """Return the item of a record.

    If it has several of the three forms, one with a field that the settings name is read, otherwise
    the first.
    """
    named = [name for name in FORMS if record.is_mapped(name)]
    there = [name for name in FORMS if name in record]
    # A null form beside another one does not count, but nothing is read in place of a named field.
    names = named or [name for name in there if record.has_value(name)] or there
    if not names:
        raise record.refused_whole(
            f"has none of the fields {', '.join(FORMS)}",
            "name the field of the messages in data.columns (at a site: data-columns), such as"
            " messages=dialog",
        )
    form = FORMS[names[0]]
    if form != "prompt" or record.is_list("prompt"):
        _require_messages_only(record)
    if form != "prompt":
        messages = _messages(record, form)
        if record.has_value("system") and messages[0][0] != "system":
            messages.insert(0, ("system", record.text("system")))
        return _item(record, form, messages, 0)
    if record.is_list("prompt"):
        messages = _messages(record, "prompt")
        first = len(messages)
        return _item(record, "completion", [*messages, *_messages(record, "completion")], first)
    prompt = record.text("prompt")
    completion = record.text("completion")
    own = len(prompt) + len(completion)
    return Item((prompt,), (completion,), 0, "", own_characters=own)


def _require_messages_only(record: Fields) -> None:
    """Refuse what a template would read besides the messages."""
    for name in OTHER_INPUTS:
        if record.has_value(name):
            raise record.refused(
                name, "is given to a template, which is not supported", "remove the field"
            )


def _item(record: Fields, field: str, messages: Sequence[tuple[str, str]], first: int) -> Item:
    """Return the item of a conversation, whose question ends before the first answer to it.

    What the assistant says before the first message of the user, such as a greeting, is a part of
    the question: many conversations begin with the same words.
    """
    roles = [role for role, _ in messages]
    if "assistant" not in roles[first:]:
        raise record.refused(
            field, "has no message of the assistant", "add the answer, or remove the record"
        )
    # Templates cannot render an empty conversation before the first answer.
    if roles.index("assistant", first) == 0:
        raise record.refused(
            field, "begins with the assistant", "put the question before the answer"
        )
    # The first message that is an answer and is not part of the prompt.
    asked = roles.index("user") if "user" in roles else 0
    answers = [at for at in range(max(first, asked), len(roles)) if roles[at] == "assistant"]
    if not answers:
        raise record.refused(
            field,
            "has no message of the assistant after the first one of the user",
            "add the answer, or remove the record",
        )
    start = answers[0]
    lines = [f"{role}: {content}" for role, content in messages]
    return Item(
        ("\n".join(lines[:start]),),
        ("\n".join(lines[start:]),),
        0,
        "\n",
        own_characters=sum(len(content) for _, content in messages),
        conversation=Conversation(tuple(messages), first),
    )


def _messages(record: Fields, name: str) -> list[tuple[str, str]]:
    """Return role and content of the messages of a field."""
    return [_message(message) for message in record.inners(name)]


def _message(message: Fields) -> tuple[str, str]:
    # A table gives messages of both forms all fields, of which those of the other form are null.
    of_sharegpt = message.has_value("from") or ("from" in message and "role" not in message)
    if of_sharegpt and message.has_value("role"):
        raise message.refused(
            "role", "is given beside 'from'", "leave one of them out, with its text"
        )
    role_field, content_field = ("from", "value") if of_sharegpt else ("role", "content")
    role = message.text(role_field)
    role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        known = ", ".join((*ROLES, *SHAREGPT_ROLES))
        raise message.refused(role_field, f"is not one of {known}", "rename the role")
    for name in ("tool_calls", "function_call"):
        if message.has_value(name):
            raise message.refused(name, "is a call of a tool, which is not supported", REMOVE)
    for name in ("reasoning_content", "reasoning", "thinking", "name", "refusal", "audio"):
        if message.has_value(name):
            raise message.refused(
                name, "is a part of the message that is not supported", "remove the field"
            )
    for name in ("weight", "train"):
        if name in message and not message.is_null(name) and not message.is_one_or_true(name):
            raise message.refused(
                name,
                "is not 1 or true: all answers count alike",
                "leave the field out, or remove the record",
            )
    if message.is_list(content_field):
        parts = [_part(part) for part in message.inners(content_field)]
        return role, "".join(parts)
    if message.is_null(content_field):
        raise message.refused(content_field, "is not a string but null", REMOVE)
    return role, message.text(content_field, may_be_blank=role in ("system", "tool"))


def _part(part: Fields) -> str:
    """Return the text of a part of a message's content."""
    if part.text("type") != "text":
        raise part.refused("type", "is not 'text'", "remove records with images or sounds")
    return part.text("text")


TASKS = (
    Task(
        CHAT,
        Hub(""),
        ("loss",),
        _chat,
        sample={
            "messages": [
                {"role": "user", "content": "Name a hardwood."},
                {"role": "assistant", "content": "Oak."},
                {"role": "user", "content": "And a softwood?"},
                {"role": "assistant", "content": "Pine."},
            ]
        },
        other_samples=(
            {
                "conversations": [
                    {"from": "human", "value": "Name a hardwood."},
                    {"from": "gpt", "value": "Oak."},
                ]
            },
            {
                "prompt": [{"role": "user", "content": "Name a hardwood."}],
                "completion": [{"role": "assistant", "content": "Oak."}],
            },
            {"prompt": "A hardwood: ", "completion": "oak"},
        ),
        other_fields=("system",),
    ),
)
