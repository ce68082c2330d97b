"""Memory of a pass through a model whose blocks are loaded one by one (``block_stream.py``)."""

from collections.abc import Mapping

from server_app.estimate.memory import Moment
from server_app.estimate.sizes import Sizes

FLOAT32 = 4
FLOAT64 = 8


def walk(
    sizes: Sizes,
    windows: int,
    tokens: int,
    watched: Mapping[str, int] | None = None,
    name: str = "",
    edited: int = 0,
) -> list[Moment]:
    """Return the moments of a pass up to the last block.

    Parameters
    ----------
    watched : bytes of the statistics collected in a block, by kind
    edited : additional bytes for each matrix that is changed while it is read
    """
    if not windows:
        return []
    hidden = {"hidden states": sizes.hidden_states(windows, tokens)}
    start = Moment(
        f"{name} embeddings",
        {**hidden, "embeddings": sizes.loaded(sizes.embeddings, sizes.embeddings)},
    )
    block = {"a block": sizes.largest_block * sizes.computed}
    read = sizes.largest_matrix * sizes.stored * sizes.is_converted + edited
    loading = Moment(f"{name} loading a block", {**hidden, **block, "a matrix as it is read": read})
    within = {"a batch in a block": sizes.pass_through_block(windows, tokens)}
    passing = Moment(f"{name} passing a block", {**hidden, **block, **within, **(watched or {})})
    return [start, loading, passing]


def evaluation(
    sizes: Sizes, windows: int, tokens: int, name: str = "evaluating,", edited: int = 0
) -> list[Moment]:
    """Return the moments of a pass that computes the losses of all sequences."""
    if not windows:
        return []
    hidden = {"hidden states": sizes.hidden_states(windows, tokens)}
    end = {"the head": sizes.loaded(sizes.head, sizes.head)}
    scoring = {"the head": sizes.head * sizes.computed, "logits": sizes.logits(windows, tokens)}
    ends = [
        Moment(f"{name} the head", {**hidden, **end}),
        Moment(f"{name} logits", {**hidden, **scoring}),
    ]
    return walk(sizes, windows, tokens, name=name, edited=edited) + ends
