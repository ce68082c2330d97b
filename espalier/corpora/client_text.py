"""Which passages are one client's own, and the calibration windows that it draws from them."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from espalier.corpora import documentation
from espalier.corpora.files import read_json_lines, read_text
from espalier.corpora.passages import digest, split
from espalier.corpora.windows import Encode, calibration_windows
from espalier.settings.node import NodeSettings
from espalier.settings.run import DataSettings, RunSettings
from espalier.settings.seeds import derive_seed


def client_passages(data: DataSettings, node: NodeSettings, rank: int, num_clients: int) -> list[str]:
    """Passages from which the client cuts its calibration windows; held-out passages are not among them.

    The node's ``data-path`` is the site's own and taken whole. Otherwise the run's ``[data]`` says what the client holds:
    one documentation source per client (shared out when there are more clients than sources), a file per client where
    the path contains ``{rank}``, or else its share of one file, dealt out by a hash of the passage.

    Raises
    ------
    Mistake
        The source or file is missing, empty or malformed.
    """
    if node.data_path:
        return split(_file(node.data_path, node.file_format(), node.data_field or data.field))[0]
    if data.source == "documentation":
        source = rank % len(documentation.SOURCES)
        sharers = -(-(num_clients - source) // len(documentation.SOURCES))
        passages, _ = split(documentation.texts(documentation.SOURCES[source]))
        return list(_dealt(passages, rank // len(documentation.SOURCES), sharers))
    passages, _ = split(_file(data.path.replace("{rank}", str(rank)), data.source, data.field))
    return passages if "{rank}" in data.path else list(_dealt(passages, rank, num_clients))


def client_windows(settings: RunSettings, node: NodeSettings, encode: Encode, rank: int) -> Tensor:
    """Calibration windows of one client, drawn with a seed of its own: (data.windows, data.window-tokens), int64."""
    data = settings.data
    passages = client_passages(data, node, rank, settings.num_clients)
    seed = derive_seed(settings.seed, "calibration", rank=rank)
    return calibration_windows(passages, encode, data.windows, data.window_tokens, seed)


def _file(path: str, file_format: str, field: str) -> Iterator[str]:
    return read_json_lines(path, field) if file_format == "jsonl" else read_text(path)


def _dealt(passages: Iterable[str], player: int, players: int) -> Iterator[str]:
    """The passages that one of several players receives; which one depends on the passage alone."""
    return (passage for passage in passages if int.from_bytes(digest(passage)[8:16], "big") % players == player)
