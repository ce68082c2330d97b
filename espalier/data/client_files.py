"""Files of one client: its own, or those of a simulation that its clients share."""

from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from espalier.amounts import count
from espalier.data.data_protection import no_data
from espalier.data.files.files import CLIENT_KEYS, JsonLinesRows
from espalier.data.files.formats import Reader, open_rows, require_one_format
from espalier.data.files.hub import HubRows
from espalier.data.files.rows import RowFile, group_of
from espalier.data.flower_partition import FlowerPartition
from espalier.data.partition import Kind, Partition
from espalier.data.passages import digest
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.data import DataSettings


@dataclass(frozen=True)
class ClientFiles:
    """Files with a client's records, and the rule by which clients divide them."""

    files: tuple[RowFile, ...]
    partition: Partition | FlowerPartition | None
    """None: all records belong to the client."""


def client_files(
    settings: RunSettings,
    node: NodeSettings,
    client: int,
    other: Reader,
    hub: HubRows | None = None,
) -> ClientFiles:
    """Return the files of one client.

    The node's ``data-path`` is the site's own data and used whole. Without one, in a simulation,
    the run's ``[data]`` names:

    - one path per client: ``data.path`` with ``{client}``, or ``by-file`` with a directory
    - files or a dataset that the clients divide (``data.partition``)

    Raises InputError if no data are named, or there are no such files.

    Parameters
    ----------
    other : reader of files whose ending names no format
    hub : dataset for ``data.source = "hub"``
    """
    data = settings.data
    num_clients = settings.num_clients
    seed = settings.seed
    path = node.data_path
    if not path:
        if hub is None and not data.path:
            raise no_data()
        if "{client}" in data.path:
            path = data.path.replace("{client}", str(client))
        elif data.partition == "by-file":
            path = own_file(data.path, client, num_clients)
    split = "" if node.data_path else data.hub_split
    if path:
        return ClientFiles(tuple(open_rows(path, CLIENT_KEYS, split, other)), None)
    assert data.partition != "by-file"
    shared = (hub,) if hub else tuple(open_rows(data.path, CLIENT_KEYS, split, other))
    if name := data.partitioner:
        partitioner = FlowerPartition(name, data.arguments, num_clients, seed, bool(data.group))
        return ClientFiles(shared, partitioner)
    return ClientFiles(shared, Partition(cast(Kind, data.partition), num_clients, data.alpha, seed))


def training_paths(data: DataSettings, num_clients: int) -> list[str]:
    """Return the paths of the files on which the clients of a simulation train."""
    clients = range(num_clients)
    if "{client}" in data.path:
        return [data.path.replace("{client}", str(client)) for client in clients]
    if data.partition == "by-file":
        return [own_file(data.path, client, num_clients) for client in clients]
    return [data.path]


def require_whole_groups(data: DataSettings, num_clients: int) -> None:
    """Refuse files of simulated clients of which two have the same group.

    Files that cannot be read are left out; reading a client's data reports them.
    """
    if not data.group or "{client}" not in data.path:
        return
    found_in: dict[bytes, str] = {}
    for path in training_paths(data, num_clients):
        own: set[bytes] = set()
        with suppress(EspalierError):
            own = _groups_in(path, data)
        if both := sorted({found_in[group] for group in own if group in found_in}):
            raise InputError(
                f"data.group = '{data.group}': {both[0]} and {path} have records of the same group,"
                " which must be one client's; move them to one file, or name one file for all"
                " clients with data.partition = 'by-group'"
            )
        found_in |= dict.fromkeys(own, path)


def _groups_in(path: str, data: DataSettings) -> set[bytes]:
    """Return hashes of the groups in the files that a path names."""
    return {
        digest(group_of(row, data.group))
        for file in open_rows(path, CLIENT_KEYS, data.hub_split, JsonLinesRows)
        for row in file.rows([data.group])
    }


def own_file(directory: str, client: int, num_clients: int) -> str:
    """Return the client's file in a directory; client i gets the i-th file in order of names.

    Raises InputError if there are fewer files than clients, or the files have different formats.
    """
    folder = at_home(directory)
    wanted = f"by-file needs a directory with {count(num_clients, 'file')}, one per client"
    try:
        if not folder.is_dir():
            raise InputError(f"data.path = {directory!r}: {wanted}; this is no directory")
        files = sorted(
            str(file)
            for file in folder.iterdir()
            if not (file.is_dir() or file.name.startswith("."))
        )
    except OSError as error:
        raise InputError(
            f"data.path = {directory!r}: cannot be read ({error.strerror}); check what the account"
            " may read"
        ) from None
    require_one_format(files, directory, CLIENT_KEYS)
    if len(files) < num_clients:
        raise InputError(f"data.path = {directory!r}: {wanted}; this one has {len(files)}")
    return files[client]
