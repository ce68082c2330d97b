"""Training sequences of a client by record or group, for DP-SGD."""

from espalier.data.client_items import item_groups
from espalier.data.client_text import group_field
from espalier.data.data_protection import redacted_errors, require_tokens
from espalier.data.privacy_units import record_sequences, require_records
from espalier.data.tasks.encoding import Encoded
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT
from espalier.training.sequences import Sequences, client_sequences, encoded_sequences

Records = list[list[int]]
"""Numbers of the sequences of each record or group."""


@redacted_errors
def private_sequences(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, client: int
) -> tuple[Sequences, Records]:
    """Return a client's training sequences, and which of them each record or group has.

    Raises InputError if the source or file is wrong, there is nothing to train on, or there are
    fewer tokens than ``min-tokens``.
    """
    if settings.task.name == TEXT:
        return _of_text(settings, node, model, client)
    sequences = client_sequences(settings, node, model, client)
    groups = item_groups(settings, node, client) if group_field(settings.data, node) else None
    numbers_by_record: dict[int, list[int]] = {}
    (part,) = sequences.parts
    for number, sequence in enumerate(part):
        # A conversation may have several sequences.
        (item,) = getattr(sequence, "items", ()) or (number,)
        record = item if groups is None else int(groups[item])
        numbers_by_record.setdefault(record, []).append(number)
    records = list(numbers_by_record.values())
    require_records(len(records))
    require_tokens(node, sum(sequences.tokens(range(len(sequences)))), "give the site more data")
    return sequences, records


def _of_text(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, client: int
) -> tuple[Sequences, Records]:
    """Return sequences of text, of which every token counts."""
    encoded: list[Encoded] = []
    records: Records = []
    for sequences in record_sequences(settings, node, model.encode, client):
        records.append(list(range(len(encoded), len(encoded) + len(sequences))))
        encoded += [Encoded(sequence, len(sequence)) for sequence in sequences]
    return encoded_sequences(encoded), records
