"""Two network namespaces with a slow wire between them that delays and loses packets.

    python -m tests.processes.slow_network PID PID DELAY LOSS MEGABITS

The command is the wire between the namespaces of two processes.

Network namespaces need root on Linux. The wire is a process that holds a TUN device in each
namespace and carries IP packets between them. Each direction has a bandwidth of ``MEGABITS`` per
second, a queue of at most one second, a delay of ``DELAY`` seconds, and loses the fraction ``LOSS``
of the packets. The kernel's TCP does the rest.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.deployment import eventually

ROOT = Path(__file__).parents[2]
SERVER = "10.77.0.1"
SITE = "10.77.0.2"
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
MAX_WAITING = 1.0
"""Maximum waiting time of a packet in the queue, in seconds; later packets are dropped."""
LARGEST = 65_536


@dataclass(frozen=True)
class Ends:
    """Command prefixes that run a command at either end."""

    server: Sequence[str]
    site: Sequence[str]


@contextmanager
def slow_network(delay: float, loss: float, megabits: float) -> Iterator[Ends]:
    """Yield a slow network; skip the test if none can be created."""
    if sys.platform != "linux" or os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("network namespaces take root on Linux, and /dev/net/tun")
    with ExitStack() as stack:
        pids = [stack.enter_context(_namespace()) for _ in range(2)]
        words = [*map(str, pids), str(delay), str(loss), str(megabits)]
        wire = [sys.executable, "-m", "tests.processes.slow_network", *words]
        stack.enter_context(_ended(subprocess.Popen(wire, cwd=ROOT)))
        server, site = ([*_inside(pid)] for pid in pids)
        # A refused connection shows that packets pass the wire in both directions.
        asked = (
            f"import errno, socket, sys; sys.exit(socket.socket().connect_ex(('{SITE}', 9)) !="
            " errno.ECONNREFUSED)"
        )
        reached = [*server, sys.executable, "-c", asked]
        eventually(
            lambda: subprocess.run(reached, capture_output=True, check=False).returncode == 0
        )
        yield Ends(server, site)


@contextmanager
def _namespace() -> Iterator[int]:
    """Start a process in its own network namespace, which lasts as long as the process."""
    with _ended(subprocess.Popen(["unshare", "--net", "sleep", "infinity"])) as holder:
        own = os.readlink("/proc/self/ns/net")
        eventually(
            lambda: holder.poll() is not None or os.readlink(f"/proc/{holder.pid}/ns/net") != own
        )
        if holder.poll() is not None:
            pytest.skip("no network namespace can be made here")
        subprocess.run([*_inside(holder.pid), "ip", "link", "set", "lo", "up"], check=True)
        yield holder.pid


def _inside(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--"]


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def carry(devices: Sequence[int], delay: float, loss: float, megabits: float) -> None:
    """Carry packets between two devices for ever."""
    # A fixed seed makes the losses repeatable.
    chance = random.Random(0)
    under_way = list[tuple[float, int, int, bytes]]()
    number = 0
    free = [0.0, 0.0]
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select(devices, [], [], wait)
        now = time.monotonic()
        for device in ready:
            packet = os.read(device, LARGEST)
            way = devices.index(device)
            # A packet is sent after its predecessors in the same direction.
            begins = max(now, free[way])
            if chance.random() < loss or begins - now > MAX_WAITING:
                continue
            free[way] = begins + 8 * len(packet) / (megabits * 1e6)
            # The number breaks ties, so that packets of equal time keep their order.
            number += 1
            heapq.heappush(under_way, (free[way] + delay, number, devices[1 - way], packet))
        while under_way and under_way[0][0] <= now:
            _, _, device, packet = heapq.heappop(under_way)
            os.write(device, packet)


def _device(pid: int, address: str, other: str) -> int:
    """Open a TUN device in a process's namespace, with an address and a route to the other end."""
    # The TUN device is created in the namespace that this thread is in.
    with open(f"/proc/{pid}/ns/net") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    for words in (
        ["addr", "add", address, "peer", other, "dev", "wire"],
        ["link", "set", "wire", "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    return device


if __name__ == "__main__":
    ends = (int(sys.argv[1]), SERVER, SITE), (int(sys.argv[2]), SITE, SERVER)
    carry([_device(*end) for end in ends], *map(float, sys.argv[3:]))
