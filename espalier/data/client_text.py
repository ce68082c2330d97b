"""Text of one client: its passages, calibration samples and training samples."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from espalier.amounts import count
from espalier.data.builtin.built_in import BUILT_IN, own_records
from espalier.data.data_protection import (
    no_data,
    not_allowed,
    require_own_data,
    require_tokens,
    told_at_the_site,
)
from espalier.data.files.corpus_index import IndexedPassages, Source, open_corpus
from espalier.data.files.hub import read_dataset
from espalier.data.files.records import Record
from espalier.data.partition import Partition
from espalier.data.passages import split
from espalier.data.samples import (
    ONCE,
    Encode,
    all_samples,
    calibration_samples,
    evaluation_samples,
)
from espalier.environment.paths import at_home
from espalier.errors import InputError
from espalier.seeds import derive_seed
from espalier.settings.node import NodeSettings
from espalier.settings.run import DataSettings, RunSettings
from espalier.storage.client_state import private_folder

MIN_PREDICTIONS = 1000
"""Minimum number of predicted tokens over which a loss on a client's own text is averaged.

A mean over fewer predictions does not leave the client.
"""


@told_at_the_site
def split_passages(
    data: DataSettings, node: NodeSettings, client: int, num_clients: int, seed: int
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the client's passages, for calibration and held out.

    The node's ``data-path`` is the site's own data and used whole. Without one, the run's
    ``[data]`` determines the client's text in a simulation; elsewhere only a built-in text is
    allowed. The alternatives are:

    - one source of a built-in text per client; clients with the same source divide it
    - one file per client: a path with ``{client}``, or ``by-file`` with a directory
    - the client's part of one file or dataset (``partition``)

    Passages of a file are read on access.

    Raises
    ------
    InputError
        The source or file is missing, empty or malformed.
    """
    require_own_data(node, data)
    if node.data_path:
        return _own_file(node.data_path, node.file_format(), _own_field(data, node), node)
    if data.source in BUILT_IN:
        return split(record.text for record in own_records(data.source, client, num_clients))
    if not data.path:
        raise no_data()
    if "{client}" in data.path:
        return _own_file(data.path.replace("{client}", str(client)), data.source, data.field, node)
    if data.partition == "by-file":
        return _own_file(own_file(data.path, client, num_clients), data.source, data.field, node)
    deal = Partition(data.partition, num_clients, data.alpha, seed)
    if data.source == "hub":
        records = read_dataset(
            data.path, data.hub_config, data.hub_split or "train", data.field, data.partition_field
        )
        return split(record.text for record in deal.share_of(client, records))
    source = _source(data.path, data.source, data.field, data.partition_field)
    return open_corpus(source, node.state_root()).share(deal, client)


def _own_field(data: DataSettings, node: NodeSettings) -> str:
    """Return the text field of the site's own records; only in a simulation the run can name it."""
    return node.data_field or (data.field if node.simulated else "text")


def _own_file(
    path: str, file_format: str, field: str, node: NodeSettings
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the passages of a file that belongs to one client."""
    return open_corpus(_source(path, file_format, field), node.state_root()).share()


def _source(path: str, file_format: str, field: str, label_field: str = "") -> Source:
    """Return a file of records; a text file has one record per passage and no fields."""
    return (
        Source(path, "jsonl", field, label_field)
        if file_format == "jsonl"
        else Source(path, "text")
    )


def site_records(data: DataSettings, node: NodeSettings) -> Iterator[Record]:
    """Yield the records of the site's own file, ``data-path``."""
    source = _source(node.data_path, node.file_format(), _own_field(data, node))
    return (located.record for located in source.located())


def own_file(directory: str, client: int, num_clients: int) -> str:
    """Return the client's file in a directory; client i gets the i-th file in order of names."""
    folder = at_home(directory)
    files = sorted(
        str(file) for file in folder.glob("*") if file.is_file() and not file.name.startswith(".")
    )
    if len(files) < num_clients:
        raise InputError(
            f"data.path = {directory!r}: by-file needs a directory with"
            f" {count(num_clients, 'file')}, one per client; this one has {len(files)}"
        )
    return files[client]


@told_at_the_site
def client_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int
) -> Tensor:
    """Return the calibration samples of one client: (num_samples, data.sequence-length), int64.

    They are drawn with a seed of this client. Their number is the node's ``num-samples`` or else
    ``data.num-samples``.

    Raises
    ------
    InputError
        The source or file is wrong, there is too little text, or the samples have fewer tokens than
        ``min-tokens``.
    """
    data = settings.data
    number = node.num_samples or settings.data.num_samples
    require_tokens(
        node,
        number * data.sequence_length,
        "raise data.num-samples or data.sequence-length, or the site's samples",
    )
    own, _ = split_passages(data, node, client, settings.num_clients, settings.seed)
    seed = derive_seed(settings.seed, "calibration", client=client)
    return calibration_samples(own, encode, number, data.sequence_length, seed)


@told_at_the_site
def training_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int
) -> Tensor:
    """Return all samples of one client's text without the held-out passages.

    Returns
    -------
    Tensor
        (samples, data.sequence-length), int64

    Raises
    ------
    InputError
        The source or file is wrong, or the text is shorter than one sample.
    """
    data = settings.data
    own, _ = split_passages(data, node, client, settings.num_clients, settings.seed)
    folder = (
        private_folder(node.state_root())
        if isinstance(own, IndexedPassages) and own.corpus.folder
        else None
    )
    what = f"data: the client's text ({ONCE})"
    return all_samples(own, encode, data.sequence_length, what, "data.sequence-length", folder)


@told_at_the_site
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


@told_at_the_site
def validation_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, client: int, most: int
) -> Tensor:
    """Return up to ``most`` samples of the client's held-out passages, int64.

    They are for figures that do not leave the client, so no minimum number of predictions holds.

    Raises
    ------
    InputError
        The source or file is wrong, or the held-out passages are shorter than one sample.
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
    _, held_out = split_passages(settings.data, node, client, settings.num_clients, settings.seed)
    return evaluation_samples(held_out, encode, settings.evaluation.sequence_length, most, what)
