"""Which passages are one client's own, and the calibration windows that it draws from them."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from espalier.corpora.built_in import BUILT_IN, own_records
from espalier.corpora.files import read_records, read_text
from espalier.corpora.hub import read_dataset
from espalier.corpora.partition import Partition
from espalier.corpora.passages import passages, split
from espalier.corpora.records import Record
from espalier.corpora.windows import Encode, all_windows, calibration_windows, evaluation_windows
from espalier.settings.mistakes import Mistake
from espalier.settings.node import NodeSettings
from espalier.settings.run import DataSettings, RunSettings
from espalier.settings.seeds import derive_seed

LEAST_PREDICTIONS = 1000
"""Over how many predicted tokens of a client's own text a loss must be a mean, to leave the client."""


def client_passages(data: DataSettings, node: NodeSettings, rank: int, num_clients: int, seed: int = 0) -> list[str]:
    """Passages from which the client cuts its calibration windows; held-out passages are not among them.

    Raises
    ------
    Mistake
        The source or file is missing, empty or malformed.
    """
    return _split_passages(data, node, rank, num_clients, seed)[0]


def _split_passages(
    data: DataSettings, node: NodeSettings, rank: int, num_clients: int, seed: int
) -> tuple[list[str], list[str]]:
    """The client's passages, for calibration and held out.

    The node's ``data-path`` is the site's own and taken whole. Otherwise the run's ``[data]`` says what the client holds:
    one source of a built-in text per client (shared out when there are more clients than sources), a file per client (the
    path contains ``{rank}``, or ``by-file`` and a directory), or else its share of one file (``partition``).
    """
    own: Iterable[Record]
    if node.data_path:
        own = _records(node.data_path, node.file_format(), node.data_field or data.field)
    elif data.source in BUILT_IN:
        own = own_records(data.source, rank, num_clients)
    elif not data.path:
        raise no_data()
    elif "{rank}" in data.path:
        own = _records(data.path.replace("{rank}", str(rank)), data.source, data.field)
    elif data.partition == "by-file":
        own = _records(own_file(data.path, rank, num_clients), data.source, data.field)
    else:
        deal = Partition(data.partition, num_clients, data.alpha, seed)
        own = deal.share_of(rank, _shared(data))
    return split(record.text for record in own)


def no_data() -> Mistake:
    """The error of a site that has no data: in a deployment the run's ``[data]`` may name none, since sites have their own."""
    return Mistake(
        "data-path: this site names no file of its own, and the run's data.path names none either; give the site one, with "
        "data-path in --node-config"
    )


def own_file(directory: str, rank: int, num_clients: int) -> str:
    """The client's file of a directory: files in order of their names, dealt out in turn."""
    folder = Path(directory).expanduser()
    files = sorted(str(file) for file in folder.glob("*") if file.is_file() and not file.name.startswith("."))
    if len(files) < num_clients:
        raise Mistake(
            f"data.path = {directory!r}: by-file needs a directory with {num_clients} files, one per client; "
            f"it has {len(files)}"
        )
    return files[rank]


def _shared(data: DataSettings) -> Iterator[Record]:
    """Records of the one body of text that simulated clients share."""
    if data.source == "hub":
        return read_dataset(data.path, data.hub_config, data.hub_split or "train", data.field, data.partition_field)
    return _records(data.path, data.source, data.field, data.partition_field)


def _records(path: str, file_format: str, field: str, label_field: str = "") -> Iterator[Record]:
    """Records of a file; a text file has one per passage."""
    if file_format == "jsonl":
        return read_records(path, field, label_field)
    return _by_passage(read_text(path))


def _by_passage(texts: Iterable[str]) -> Iterator[Record]:
    return (Record(passage) for text in texts for passage in passages(text))


def client_windows(settings: RunSettings, node: NodeSettings, encode: Encode, rank: int) -> Tensor:
    """Calibration windows of one client, drawn with a seed of its own: (windows, data.window-tokens), int64.

    There are as many as the node's ``windows`` says, else ``data.windows``.
    """
    data = settings.data
    own = client_passages(data, node, rank, settings.num_clients, settings.seed)
    seed = derive_seed(settings.seed, "calibration", rank=rank)
    return calibration_windows(own, encode, node.windows or data.windows, data.window_tokens, seed)


def training_windows(settings: RunSettings, node: NodeSettings, encode: Encode, rank: int) -> Tensor:
    """All windows of one client's text, held-out passages excluded: (windows, data.window-tokens), int64.

    Raises
    ------
    Mistake
        The source or file is wrong, or there is not one window of text.
    """
    data = settings.data
    own = "\n\n".join(client_passages(data, node, rank, settings.num_clients, settings.seed))
    return all_windows(own, encode, data.window_tokens, "data: the client's text", "data.window-tokens")


def held_out_windows(settings: RunSettings, node: NodeSettings, encode: Encode, rank: int) -> Tensor:
    """Windows of the client's own held-out passages, of which no calibration window has a token.

    Returns
    -------
    Tensor
        (at most evaluation.max-windows, evaluation.window-tokens), int64

    Raises
    ------
    Mistake
        The site does not allow it, the source or file is wrong, or the held-out passages have too few tokens; the least number
        is named, the text is not.
    """
    if not node.allows_own_text():
        raise Mistake("evaluation.own-text: this site does not allow it; its owner can, with own-text=true in --node-config")
    _, held_out = _split_passages(settings.data, node, rank, settings.num_clients, settings.seed)
    chosen = settings.evaluation
    what = "evaluation.own-text: the client's held-out text"
    windows = evaluation_windows("\n\n".join(held_out), encode, chosen.window_tokens, chosen.max_windows, what)
    predictions = len(windows) * (chosen.window_tokens - 1)
    if predictions < LEAST_PREDICTIONS:
        raise Mistake(
            f"{what} gives fewer than {LEAST_PREDICTIONS} predictions, and a mean over them says too much about single words; "
            "give the client more text, or raise evaluation.max-windows or evaluation.window-tokens"
        )
    return windows
