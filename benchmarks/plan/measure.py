"""Measurement of one run in a new process; the configuration is read from stdin.

The run's files stay in the folder that the argument names.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from benchmarks.plan.separate_clients import SeparateGrid, forget_peak, peak, state_in


def main() -> None:
    """Do the run, and print the figures as the last line."""
    from server_app.app import run_method

    config = json.load(sys.stdin)
    folder = Path(sys.argv[1])
    nodes = [
        {"partition-id": client, "num-partitions": config["num-clients"]}
        for client in range(config["num-clients"])
    ]
    peaks = _peaks_by_event()
    with state_in(folder / "state"):
        grid = SeparateGrid(nodes, config)
        started = time.perf_counter()
        busy = time.process_time()
        run = run_method(grid, Context(1, 0, {}, RecordDict(), config))
        server = {
            "peaks": {**peaks, "end": peak()},
            "seconds": time.process_time() - busy,
            "wall": time.perf_counter() - started,
        }
        grid.end()
    sums: dict[str, dict[str, int]] = {}
    for entry in map(json.loads, (run / "ledger.jsonl").read_text().splitlines()):
        # Other entries are enrolment and virtual times.
        if entry["client"] >= 0 and entry["direction"]:
            own = sums.setdefault(str(entry["client"]), {"down": 0, "up": 0})
            own[entry["direction"]] += entry["wire_bytes"]
    disk = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    print(
        json.dumps(
            {
                "disk": disk,
                "bytes": sums,
                "server": server,
                "clients": grid.figures,
                "run": str(run),
            }
        )
    )


def _peaks_by_event() -> dict[str, int]:
    """Return a dictionary that collects the server's peak resident memory before each event.

    Bytes, by event. The peak is reset at every event.
    """
    from strategies.base.progress import Progress

    peaks: dict[str, int] = {}
    note = Progress.note

    def noted(self: Progress, event: str, *arguments: Any, **named: Any) -> None:
        peaks[event] = max(peaks.get(event, 0), peak())
        forget_peak()
        note(self, event, *arguments, **named)

    Progress.note = noted  # type: ignore[method-assign]
    return peaks


if __name__ == "__main__":
    main()
