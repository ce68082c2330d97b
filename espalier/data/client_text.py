"""Text of one client: its passages, calibration samples and training samples."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from espalier.data.builtin.built_in_texts import BUILT_IN, own_passages
from espalier.data.client_files import client_files
from espalier.data.data_protection import (
    not_allowed,
    redacted_errors,
    require_groups,
    require_own_data,
    require_tokens,
)
from espalier.data.files.corpus_index import Indexed, open_corpus
from espalier.data.files.files import CLIENT_KEYS, TextRows, opened, require_text
from espalier.data.files.formats import open_rows
from espalier.data.files.hub import HubRows
from espalier.data.files.rows import RowFile, text_of
from espalier.data.partition import Partition
from espalier.data.passages import split
from espalier.data.samples import (
    ONCE,
    Encode,
    all_samples,
    calibration_samples,
    calibration_starts,
    evaluation_samples,
)
from espalier.data.text_source import TextSource
from espalier.data.token_cache import cached_tokens, state_of
from espalier.data.token_pieces import MAX_MOVED, TokenPieces, identity_of
from espalier.errors import InputError
from espalier.seeds import derive_seed
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.data import DataSettings
from espalier.storage.client_state import private_folder

MIN_PREDICTIONS = 1000
"""Minimum number of predicted tokens over which a loss on a client's own text is averaged.

A mean over fewer predictions does not leave the client.
"""


@redacted_errors
def split_passages(
    settings: RunSettings, node: NodeSettings, client: int
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the client's passages, for calibration and held out.

    The node's ``data-path`` is the site's own data and used whole. Without one, the run's
    ``[data]`` determines the client's text in a simulation; elsewhere only a built-in text is
    allowed. The alternatives are:

    - one source of a built-in text per client; clients with the same source divide it
    - files or a dataset (see ``client_files``), whose passages are read on access

    Raises InputError if the source or file is missing, empty or malformed.
    """
    data = settings.data
    require_own_data(node, data)
    if not node.data_path and data.origin in BUILT_IN:
        return split(own_passages(data.origin, client, settings.num_clients))
    return _indexed_passages(settings, node, client, distinct=True)


def _indexed_passages(
    settings: RunSettings, node: NodeSettings, client: int, *, distinct: bool
) -> tuple[Indexed[str], Indexed[str]]:
    """Return the client's passages in files, for calibration and held out."""
    data = settings.data
    hub = None
    if data.origin == "hub":
        called = f"data.path = {data.path!r}: the dataset"
        hub = HubRows(data.path, data.hub_config, data.hub_split or "train", called)
    source_files = client_files(settings, node, client, TextRows, hub)
    source = _text_source(source_files.files, data, node)
    corpus = open_corpus(source, node.state_root())
    if isinstance(source_files.partition, Partition):
        source_files.partition.require_enough(corpus.labels)
    # In a private run, what a group contributes would depend on the others.
    keep = distinct and bool(group_field(data, node))
    calibration, held_out = corpus.share(
        source_files.partition, client, distinct=distinct, never_empty=keep
    )
    if node.fewest_groups():
        require_groups(node, [set(calibration.label_numbers.tolist())], "give the site more data")
    return calibration, held_out


@redacted_errors
def records_of_client(settings: RunSettings, node: NodeSettings, client: int) -> list[list[str]]:
    """Return the passages of each record or group of a client, without held-out passages.

    A group has all passages of its records. A record of a text file, and of a built-in text, is a
    passage. What belongs to a record or group depends on no other one: a passage that occurs in two
    of them is in both. Within one it counts as often as it occurs. Raises InputError if the source
    or file is missing, empty or malformed, or there are fewer groups than ``min-groups``.
    """
    data = settings.data
    require_own_data(node, data)
    if not node.data_path and data.origin in BUILT_IN:
        own = own_passages(data.origin, client, settings.num_clients)
        return [[passage] for passage in split(own)[0]]
    indexed, _ = _indexed_passages(settings, node, client, distinct=False)
    numbers = indexed.label_numbers if group_field(data, node) else indexed.record_numbers
    records: dict[int, list[str]] = {}
    for number, passage in zip(numbers.tolist(), indexed, strict=True):
        records.setdefault(number, []).append(passage)
    return list(records.values())


def _text_source(files: tuple[RowFile, ...], data: DataSettings, node: NodeSettings) -> TextSource:
    """Return the texts of some files; text files have one record per passage and no fields.

    Only in a simulation the run can name the fields.
    """
    if isinstance(files[0], TextRows):
        _refuse_fields(files[0], data, node)
        return TextSource(files)
    if node.simulated:
        return TextSource(files, node.data_field or data.field, data.partition_field, data.group)
    return TextSource(files, node.data_field or "text", group_field=node.data_group)


def _refuse_fields(file: TextRows, data: DataSettings, node: NodeSettings) -> None:
    """Refuse settings that name fields of a text file.

    Raises InputError if the text has another field than ``text``, or records have labels or groups.
    """
    named = {"data-field": node.data_field, "data-group": node.data_group}
    if node.simulated:
        named |= {
            "data.field": data.field if data.field != "text" else "",
            "data.partition-field": data.partition_field,
            "data.group": data.group,
        }
    for key, value in named.items():
        if value:
            # A file that is no text at all has another remedy.
            with opened(file.path, file.keys) as content:
                require_text(content)
            raise InputError(
                f"{key} = '{value}': {file.path} is a text file, which has no fields; leave it out,"
                " or name a file of records, such as JSON Lines, CSV or Parquet"
            )


def group_field(data: DataSettings, node: NodeSettings) -> str:
    """Return the field that joins a client's records to groups; empty if there is none."""
    return data.group if node.simulated else node.data_group


def site_texts(data: DataSettings, node: NodeSettings) -> Iterator[str]:
    """Yield the texts of the site's own records, ``data-path``."""
    source = _text_source(tuple(open_rows(node.data_path, CLIENT_KEYS)), data, node)
    for file in source.files:
        for row in file.rows(source.columns):
            yield text_of(row, source.field).text


@redacted_errors
def client_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int
) -> Tensor:
    """Return the calibration samples of one client: (num_samples, data.sequence-length), int64.

    They are drawn with a seed of this client. Their number is the node's ``num-samples`` or else
    ``data.num-samples``. Raises InputError if the source or file is wrong, there is too little
    text, or the samples have fewer tokens than ``min-tokens``, or are from fewer groups than
    ``min-groups``.
    """
    data = settings.data
    number = node.num_samples or data.num_samples
    require_tokens(
        node,
        number * data.sequence_length,
        "raise data.num-samples or data.sequence-length, or the site's samples",
    )
    passages, _ = split_passages(settings, node, client)
    seed = derive_seed(settings.seed, "calibration", client=client)
    samples = calibration_samples(passages, encode, number, data.sequence_length, seed)
    if node.fewest_groups():
        groups = sample_groups(settings, node, encode, client, drawn=True)
        require_groups(node, groups, "raise data.num-samples or data.sequence-length")
    return samples


def sample_groups(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int, *, drawn: bool
) -> list[set[int]]:
    """Return the groups whose text is in each sample of a client's records.

    A group may be missed, for example if its passages are encoded together with those of others,
    but no group is counted that is not there.

    Parameters
    ----------
    drawn : whether the samples are those of ``client_samples``, or of ``training_samples``
    """
    data = settings.data
    passages, _ = split_passages(settings, node, client)
    assert isinstance(passages, Indexed)
    # Each passage is a piece of its own, if the tokenizer allows it.
    tokens = TokenPieces(passages, encode, piece_characters=1)
    begins = [piece.start for piece in tokens.pieces]
    firsts = [piece.first for piece in tokens.pieces]
    # Signed, for the -1 below.
    labels = passages.label_numbers.astype(np.int64)
    lowest = np.minimum.reduceat(labels, firsts)
    # (pieces,): the group of a piece, or -1 if its passages are from several groups.
    groups = np.where(lowest == np.maximum.reduceat(labels, firsts), lowest, -1)
    length = data.sequence_length
    if drawn:
        number = node.num_samples or data.num_samples
        seed = derive_seed(settings.seed, "calibration", client=client)
        starts = calibration_starts(len(tokens), number, length, seed)
    else:
        starts = [number * length for number in range(len(tokens) // length)]
    # Blanks at the ends of a sample are no text of a group.
    inner = np.searchsorted(begins, np.add(starts, MAX_MOVED), side="right") - 1
    ends = np.searchsorted(begins, np.add(starts, length - MAX_MOVED), side="left")
    return [set(groups[first:end].tolist()) - {-1} for first, end in zip(inner, ends, strict=True)]


@redacted_errors
def training_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int
) -> Tensor:
    """Return all samples of one client's text without the held-out passages.

    Raises InputError if the source or file is wrong, or the text is shorter than one sample.

    Returns
    -------
    Tensor
        (samples, data.sequence-length), int64
    """
    data = settings.data
    passages, _ = split_passages(settings, node, client)
    length = data.sequence_length
    what = f"data: the client's text ({ONCE})"
    folder = partial(private_folder, node.state_root())

    def make() -> tuple[Tensor, int]:
        samples = all_samples(passages, encode, length, what, "data.sequence-length", folder)
        return samples, samples.numel()

    tokenizer = identity_of(encode)
    if not (node.keep_model and tokenizer and isinstance(passages, Indexed)):
        return make()[0]
    return cached_tokens((tokenizer, state_of(passages), length), make)


@redacted_errors
def held_out_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int
) -> Tensor:
    """Return samples of the client's own held-out passages for evaluation.

    No calibration sample or training sample has a token of these passages.

    Returns
    -------
    Tensor
        (at most evaluation.max-samples, evaluation.sequence-length), int64

    Raises
    ------
    InputError
        The site does not permit it, the source or file is wrong, or the held-out passages have too
        few tokens. The error has the required number but not the text.
    """
    if not node.allows_own_text():
        raise not_allowed()
    what = "evaluation.own-text: the client's held-out text"
    samples = _held_out(settings, node, encode, client, settings.evaluation.max_samples, what)
    predictions = len(samples) * (settings.evaluation.sequence_length - 1)
    if predictions < MIN_PREDICTIONS:
        text = (
            f"{what} gives fewer than {MIN_PREDICTIONS} predictions, and their mean would"
            " reveal too much about single words; give the client more text, or raise"
            " evaluation.max-samples or evaluation.sequence-length"
        )
        raise InputError(text, text)
    return samples


@redacted_errors
def validation_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int, most: int
) -> Tensor:
    """Return up to ``most`` samples of the client's held-out passages, int64.

    They are for figures that do not leave the client, so no minimum number of predictions holds.
    Raises InputError if the source or file is wrong, or the held-out passages are shorter than one
    sample.
    """
    return _held_out(
        settings,
        node,
        encode,
        client,
        most,
        f"{settings.method}.validation-samples: the client's held-out text",
    )


def _held_out(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int, most: int, what: str
) -> Tensor:
    _, held_out = split_passages(settings, node, client)
    if not len(held_out) and group_field(settings.data, node):
        text = (
            f"{what} is empty, because whole groups are held out, about one in ten, and the client"
            " has none of these; give it more groups, or leave this evaluation out"
        )
        raise InputError(text, text)
    return evaluation_samples(held_out, encode, settings.evaluation.sequence_length, most, what)
