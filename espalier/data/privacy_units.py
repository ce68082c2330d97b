"""Token sequences of each record or group of a client, for private runs.

A record's sequences are cut from its own text and padded, where other runs cut them from the text
of all records together: there, one more record would move the text of all that follow. What a
record or group contributes therefore depends on nothing else of the site.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.data.client_text import records_of_client
from espalier.data.data_protection import redacted_errors, require_tokens
from espalier.data.token_pieces import BETWEEN, Encode
from espalier.errors import InputError
from espalier.privacy.noise import MAX_RECORDS
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings

SHORTEST = 2
"""Minimum number of tokens of a sequence, of which one is predicted."""

Sequences = list[tuple[int, ...]]
"""Token sequences of one record or group."""


@redacted_errors
def record_sequences(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int
) -> list[Sequences]:
    """Return the sequences of each record or group, of at most ``data.sequence-length`` tokens.

    Records that are shorter than two tokens have none and are left out. Raises InputError if the
    source or file is wrong, there is no text, or there are fewer tokens than ``min-tokens``.
    """
    length = settings.data.sequence_length
    records = [
        sequences
        for passages in records_of_client(settings, node, client)
        if (sequences := cut_sequences(encode(BETWEEN.join(passages)), length))
    ]
    require_records(len(records))
    tokens = sum(len(sequence) for sequences in records for sequence in sequences)
    require_tokens(node, tokens, "give the site more data")
    return records


def cut_sequences(tokens: Sequence[int], length: int) -> Sequences:
    """Cut the tokens of one record or group; the last sequence may be shorter."""
    cut = (tuple(tokens[start : start + length]) for start in range(0, len(tokens), length))
    return [sequence for sequence in cut if len(sequence) >= SHORTEST]


def require_records(number: int) -> None:
    """Raise InputError if there are no records or groups, or more than can be added."""
    if not number:
        raise InputError("data: the client has no record of two tokens; give it more text")
    if number > MAX_RECORDS:
        raise InputError(
            f"data: the client has {number} records or groups, and at most {MAX_RECORDS} can be"
            " added in a private run; name a smaller file",
            "data: the client has too many records for a private run",
        )


def padded(sequences: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return sequences padded on the right with token 0, and the length of each.

    All are padded to a length that does not depend on them, so that no record changes the shape in
    which others are computed, and with it the last bits of their numbers.

    Returns
    -------
    (samples, lengths)
        (sequences, length) and (sequences,), int64
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    samples = torch.zeros(len(sequences), length, dtype=torch.int64)
    for row, sequence in zip(samples, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    return samples, lengths
