"""TCP sockets of this machine, as ``/proc/net`` lists them on Linux; elsewhere there are none."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ESTABLISHED = "01"
LISTENING = "0A"


class TcpSocket(NamedTuple):
    """One line of the tables."""

    port: int
    remote_address: str
    """Hexadecimal digits, with the bytes in the machine's order."""
    remote_port: int
    user: int
    inode: str


def tcp_sockets(state: str) -> Iterator[TcpSocket]:
    """Yield the sockets of all users that are in a state, such as ``LISTENING``."""
    for table in ("tcp", "tcp6"):
        # Systems other than Linux have no such file, and some machines have no IPv6.
        with suppress(OSError):
            # The first line has the names of the columns.
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == state:
                    _, _, port = columns[1].rpartition(":")
                    address, _, remote_port = columns[2].rpartition(":")
                    user, inode = int(columns[7]), columns[9]
                    yield TcpSocket(int(port, 16), address, int(remote_port, 16), user, inode)
