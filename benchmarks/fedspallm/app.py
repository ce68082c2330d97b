"""One complete run of the app in this process: real handlers, messages as function calls."""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from client_app.app import app
from server_app.app import run_method
from tests.in_process import InProcessGrid


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run with these flat settings; its files are discarded."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["ESPALIER_STATE_DIR"] = str(Path(scratch) / "state")
        settings = {**config, "out-dir": str(Path(scratch) / "runs"), "enrol-seconds": 1.0}
        clients = settings["num-clients"]
        nodes = [{"partition-id": client, "num-partitions": clients} for client in range(clients)]
        with contextlib.redirect_stdout(io.StringIO()):
            folder = run_method(
                InProcessGrid(app, nodes, settings), Context(1, 0, {}, RecordDict(), settings)
            )
        document: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return document
