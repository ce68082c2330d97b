"""Token ids of items, split into context and answer as in lm-evaluation-harness."""

from dataclasses import dataclass

from espalier.amounts import count
from espalier.data.samples import Encode
from espalier.errors import InputError


@dataclass(frozen=True)
class Encoded:
    """Token ids of a context and its continuation, which has ``answer_tokens`` tokens."""

    token_ids: tuple[int, ...]
    answer_tokens: int


def encode_pair(encode: Encode, context: str, continuation: str) -> Encoded:
    """Encode a context with its continuation, and split the tokens at the end of the context.

    This is ``_encode_pair`` of lm-evaluation-harness 0.4.13. Blank space at the end of the context
    belongs to the continuation, because tokenizers join it to the next word. The last token always
    belongs to the continuation, even if the two are joined into fewer tokens than the context has
    without it.

    Parameters
    ----------
    encode : tokenizer; it can add tokens before a text but not after it
        (``special_tokens.prompt_encoder``), because otherwise the context's length is not the start
        of the continuation

    Raises
    ------
    InputError
        Both together have fewer than two tokens, so no token has a context.
    """
    stem = context.rstrip()
    token_ids = tuple(encode(context + continuation))
    if len(token_ids) < 2:
        raise InputError(
            f"an item with its answer has {count(len(token_ids), 'token')}, but a prediction"
            " needs at least 2; use a tokenizer with a beginning-of-text token, or remove items"
            " that are this short"
        )
    # At least one token on either side.
    start = min(max(1, len(encode(stem))), len(token_ids) - 1)
    return Encoded(token_ids, len(token_ids) - start)


def keep_right(
    encoded: Encoded, max_tokens: int, where: str = "", key: str = "task.max-tokens"
) -> Encoded:
    """Return the last ``max_tokens`` tokens, which include the whole answer.

    Parameters
    ----------
    where : position of the item, for errors
    key : setting to raise, for errors

    Raises
    ------
    InputError
        The answer leaves no room for a token of the context.
    """
    if encoded.answer_tokens >= max_tokens:
        raise InputError(
            f"{where or 'an item'}: an answer has {encoded.answer_tokens} tokens, but only"
            f" {max_tokens - 1} fit after the last token of its prompt; raise {key}, or remove"
            " items with long answers"
        )
    return Encoded(encoded.token_ids[-max_tokens:], encoded.answer_tokens)
