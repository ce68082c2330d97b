"""Checks that a model can process the sequences and the tokens of a run.

A model with learned positions raises an index error beyond its last position. A model with rotary
positions silently computes something that it was not trained for.
"""

from espalier.errors import InputError
from espalier.hf.opening.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT


def require_within_limits(settings: RunSettings, model: OpenedModel) -> None:
    """Refuse a run whose sequences or tokenizer exceed the limits of the model.

    Raises
    ------
    InputError
        One line for each setting that is too large, and one line if the tokenizer has too many
        tokens.
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
            f"{model.directory}: its tokenizer has token ids up to {tokens - 1}, but the model"
            f" has {embeddings} embeddings (vocab_size in its config.json); replace the"
            " tokenizer by the one with which the model was trained"
        )
    if lines:
        raise InputError("\n".join(lines))


def sequence_lengths(settings: RunSettings, encoder: bool) -> dict[str, int]:
    """Return the sequence lengths that a run sets, in tokens, by the name of the setting.

    Settings that the run does not use are left out. Encoders do not evaluate on text.
    """
    data = settings.data
    evaluation = settings.evaluation
    task = settings.task
    on_items = settings.tunes and task.name != TEXT
    lengths = {}
    if not encoder:
        lengths["evaluation.sequence-length"] = evaluation.sequence_length
        if not on_items:
            lengths["data.sequence-length"] = data.sequence_length
    if on_items:
        lengths["task.max-tokens"] = task.max_tokens
        if task.max_test_tokens:
            lengths["task.max-test-tokens"] = task.max_test_tokens
    return lengths
