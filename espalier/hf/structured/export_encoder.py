"""Export of a pruned encoder with merged adapters and a classification head."""

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
    """Write a pruned encoder, like ``export_encoder``.

    The form is ``plain`` if all blocks are alike, otherwise ``compact``, which includes the code
    that builds the model.

    Parameters
    ----------
    model : encoder with its structure, which may keep everything
    edits : changes to its weights
    head : tensors of the head by canonical name, such as ``head.dense.weight``, float32
    classes : names of the classes in the head's order, for ``config.json``
    target : directory to write
    card : content of ``README.md``; an empty string writes none

    Raises
    ------
    InputError
        Writing failed.
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
