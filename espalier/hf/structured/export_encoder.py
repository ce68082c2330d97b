"""Write a smaller encoder whole, with merged adapters and its classification head, in the best form that it can have."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from espalier.hf.export.encoder import labelled, write_weights
from espalier.hf.export.model import made_whole, write_card
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.edits import Edits
from espalier.hf.structured.configuration import STRUCTURED_CLASS
from espalier.hf.structured.export import best_form, config_of, write_beside


def export_cut_encoder(
    model: OpenedModel,
    edits: Edits,
    head: Mapping[str, Tensor],
    classes: Sequence[str],
    target: Path,
    card: str = "",
) -> None:
    """As ``export_encoder``, of what a structure keeps: for transformers alone where blocks are alike, else with their code.

    Parameters
    ----------
    model : what is kept of an encoder, which may be all
    head : its tensors by canonical name, float32: ``head.dense.weight`` ...
    classes : names of the classes in the head's order, for ``config.json``
    card : its ``README.md``; an empty one is not written

    Raises
    ------
    Mistake
        The file system refused.
    """
    skeleton = model.new_skeleton(len(classes))
    form = best_form(model)
    name = type(skeleton).__name__
    if form == "plain":
        name = name.removeprefix(STRUCTURED_CLASS)
    with made_whole(target) as unfinished:
        write_weights(model, skeleton, edits, head, unfinished)
        write_beside(model, unfinished, form, labelled(config_of(model, form), name, classes))
        write_card(unfinished, card)
