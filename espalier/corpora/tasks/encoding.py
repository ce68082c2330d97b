"""Items as token ids, split into context and answer as lm-evaluation-harness does it."""

from dataclasses import dataclass

from espalier.amounts import count
from espalier.corpora.windows import Encode
from espalier.settings.mistakes import Mistake


@dataclass(frozen=True)
class Encoded:
    """Token ids of a context and what follows it; the last ``answer_tokens`` of them are what follows."""

    token_ids: tuple[int, ...]
    answer_tokens: int


def encode_pair(encode: Encode, context: str, continuation: str) -> Encoded:
    """Encode a context and its continuation together, and split the tokens where the context alone would end.

    ``_encode_pair`` of lm-evaluation-harness 0.4.13: blank space at the end of the context goes to the continuation, because
    tokenizers join it to the word that follows. ``encode`` may put tokens before a text, and none behind it
    (``special_tokens.prompt_encoder``), or the length of the context would not be where the continuation begins. The last
    token belongs to the continuation even where the two are joined into fewer tokens than the context has alone.

    Raises
    ------
    Mistake
        The two are a single token or none, so there is no context to predict from.
    """
    stem = context.rstrip()
    token_ids = tuple(encode(context + continuation))
    if len(token_ids) < 2:
        raise Mistake(
            f"an item and its answer give {count(len(token_ids), 'token')}, at least 2 are needed"
            " to predict one from another; take a tokenizer with a token for the beginning of a"
            " text, or remove items that are that short"
        )
    start = min(max(1, len(encode(stem))), len(token_ids) - 1)
    return Encoded(token_ids, len(token_ids) - start)


def keep_right(
    encoded: Encoded, max_tokens: int, where: str = "", key: str = "task.max-tokens"
) -> Encoded:
    """The last ``max_tokens`` tokens, with the whole answer.

    Mistake if no token is left before it; it says ``where``, and names the ``key`` to raise.
    """
    if encoded.answer_tokens >= max_tokens:
        raise Mistake(
            f"{where or 'an item'}: an answer has {encoded.answer_tokens} tokens, and"
            f" {max_tokens - 1} fit behind the last token of its prompt; raise {key}, or remove"
            " items with long answers"
        )
    return Encoded(encoded.token_ids[-max_tokens:], encoded.answer_tokens)
