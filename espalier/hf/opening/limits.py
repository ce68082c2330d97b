"""What a run may ask of its model: sequences no longer than it takes, and a tokenizer whose tokens it all has embeddings for.

Beyond its positions a model with learned ones ends in an index error, and one with rotary ones computes something that it was
not trained for, without a word.
"""

from espalier.errors import Mistake
from espalier.hf.opening.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT


def require_within_limits(settings: RunSettings, model: OpenedModel) -> None:
    """Refuse a run that asks more of a model, at the server or at a site.

    Raises
    ------
    Mistake
        With one line per key that is too large, and one if the tokenizer has too many tokens.
    """
    lines = []
    if (positions := model.num_positions) is not None:
        lines = [
            f"{key} = {tokens}: the model has {positions} positions ({model.positions_key} in its"
            f" config.json); set it to {positions} or less"
            for key, tokens in sequence_lengths(settings, model.family.kind == "encoder").items()
            if tokens > positions
        ]
    tokens = model.num_tokens
    embeddings = model.num_embeddings
    if embeddings is not None and tokens > embeddings:
        lines.append(
            f"{model.directory}: its tokenizer has tokens up to number {tokens - 1}, but the model"
            f" has embeddings for {embeddings} (vocab_size in its config.json); put the tokenizer"
            " beside it that the model was trained with"
        )
    if lines:
        raise Mistake("\n".join(lines))


def sequence_lengths(settings: RunSettings, encoder: bool) -> dict[str, int]:
    """The settings that say how many tokens a model is given at once, of those that the run uses; encoders read no text."""
    data = settings.data
    evaluation = settings.evaluation
    task = settings.task
    on_items = settings.tunes and task.name != TEXT
    lengths = {}
    if not encoder:
        lengths["evaluation.window-tokens"] = evaluation.window_tokens
        if not on_items:
            lengths["data.window-tokens"] = data.window_tokens
    if on_items:
        lengths["task.max-tokens"] = task.max_tokens
        if task.max_test_tokens:
            lengths["task.max-test-tokens"] = task.max_test_tokens
    return lengths
