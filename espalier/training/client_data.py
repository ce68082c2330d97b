"""Check of all data that a client will read in a run, before the run."""

from espalier.amounts import count
from espalier.data.client_items import held_out_items
from espalier.data.client_text import client_samples, held_out_samples
from espalier.hf.opening.opened import OpenedModel
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from espalier.training.sequences import client_sequences


def read_client_data(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, client: int
) -> list[str]:
    """Read a client's data as its rounds will, and describe it.

    The description is for the data's owner and must not be sent.

    Raises
    ------
    InputError
        The data cannot be used; the error is the one that the round would raise.
    """
    tunes = settings.tunes
    held_out = settings.evaluation.own_text
    tokens = settings.data.sequence_length
    task = settings.task.name
    if not tunes:
        found = [
            f"{count(len(client_samples(settings, node, model.encode, client)), 'calibration sample')}"
            f" of {tokens} tokens"
        ]
    elif task == TEXT:
        found = [
            f"{count(len(client_sequences(settings, node, model, client)), 'training sequence')} of"
            f" {tokens} tokens"
        ]
    else:
        found = [
            f"{count(len(client_sequences(settings, node, model, client)), 'item')} of the task"
            f" {task} to train on"
        ]
    if held_out and (not tunes or task == TEXT):
        samples = held_out_samples(settings, node, model.encode, client)
        found.append(
            f"{count(len(samples), 'held-out sample')} of {settings.evaluation.sequence_length}"
            " tokens"
        )
    elif held_out:
        items = held_out_items(
            settings,
            node,
            model.tokenizer,
            client,
            model.family.kind == "encoder",
            model.num_positions,
        )
        found.append(count(len(items), "held-out item"))
    return found
