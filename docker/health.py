"""Health check of a container by its processes; ends with exit code 0 if all is well.

python health.py superlink PORT [PORT ...]    the SuperLink listens on these ports
python health.py site PORT                    the SuperNode is connected to this server port
"""

import sys

import psutil

STATES = {"superlink": psutil.CONN_LISTEN, "site": psutil.CONN_ESTABLISHED}
PROGRAMS = {"superlink": "flower-superlink", "site": "espalier.flower.supernode"}


def is_healthy(kind: str, ports: set[int]) -> bool:
    """Return True if processes of this kind have sockets at all of these ports."""
    found: set[int] = set()
    for process in psutil.process_iter(["cmdline"]):
        if any(word.endswith(PROGRAMS[kind]) for word in process.info["cmdline"] or ()):
            for socket in process.net_connections("tcp"):
                if socket.status == STATES[kind] and (
                    end := socket.laddr if kind == "superlink" else socket.raddr
                ):
                    found.add(end.port)
    return ports <= found


if __name__ == "__main__":
    sys.exit(0 if is_healthy(sys.argv[1], set(map(int, sys.argv[2:]))) else 1)
