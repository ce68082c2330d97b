"""Record of a run's estimate (``plan.json``), to compare it with what the run needed.

All values are bytes, except ``seconds`` and speeds. ``left_open`` says on what the bytes of
messages depend apart from the settings; the file then has the most and the least of them.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json_object
from espalier.hf.machine.machine_memory import peak_resident
from espalier.storage.atomic import write_json
from server_app.estimate.estimate import Plan, Speeds

FILE = "plan.json"


def record_plan(plan: Plan, speeds: Speeds, folder: Path) -> None:
    """Write ``plan.json``, unless an earlier part of a resumed run has written it.

    Raises InputError if the file system refused.
    """
    if not (folder / FILE).exists():
        write_json(folder / FILE, _document(plan, speeds))


def record_peak(folder: Path, client_memory: int = 0) -> None:
    """Add the highest resident memory of this process to ``plan.json``, if there is one.

    Raises InputError if the file is damaged, or the file system refused.

    Parameters
    ----------
    client_memory : highest resident memory of a client's process; 0: unknown
    """
    if not (folder / FILE).exists():
        return
    document = read_json_object(folder / FILE)
    # A resumed run has several processes, of which the largest counts.
    before = document.get("measured", {})
    peaks = {"server_memory": peak_resident(), "client_memory": client_memory}
    measured = {name: max(peak, before.get(name, 0)) for name, peak in peaks.items() if peak}
    write_json(folder / FILE, {**document, "measured": measured})


def _document(plan: Plan, speeds: Speeds) -> dict[str, Any]:
    largest = plan.traffic.total()
    smallest = plan.traffic.total("least")
    return {
        "bytes_up": largest.up,
        "bytes_down": largest.down,
        "least_bytes_up": smallest.up,
        "least_bytes_down": smallest.down,
        "left_open": plan.traffic.open_questions,
        "bytes_by_kind": _by_kind(plan),
        "client_memory": plan.client.peak,
        "server_memory": plan.server.peak,
        "server_disk": sum(plan.server_disk.values()),
        "client_disk": sum(plan.client_disk.values()),
        "seconds": {
            "round_of_a_client": speeds.seconds(plan.work.operations()),
            "teraflops": speeds.teraflops,
            "measured": speeds.measured,
        },
    }


def _by_kind(plan: Plan) -> dict[str, dict[str, int]]:
    """Return the bytes of all clients in each direction, by kind of message."""
    counters: dict[str, Counter[str]] = {}
    for exchanges in plan.traffic.exchanges().values():
        for exchange in exchanges:
            counters.setdefault(exchange.kind, Counter()).update(
                {"up": exchange.up, "down": exchange.down}
            )
    return {kind: {"up": sums["up"], "down": sums["down"]} for kind, sums in counters.items()}
