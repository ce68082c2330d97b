"""Run directory without a result, to which tests add models."""

import json
from pathlib import Path


def save_run(folder: Path, base: str) -> Path:
    """Write what a run directory has without a result: settings and a summary of two clients."""
    folder.mkdir()
    clients = [{"client": 0, "site": "clinic-b"}, {"client": 1, "site": "clinic-a"}]
    summary = {
        "status": "completed",
        "reason": None,
        "method": "flap",
        "clients": clients,
        "num_clients": 2,
        "finished": 2,
        "seconds": 1.0,
        "metrics": [],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "settings.toml").write_text(f"model = {json.dumps(base)}\n")
    return folder
