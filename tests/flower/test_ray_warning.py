"""Plain ``flwr run`` does not print Ray's warning about its later versions."""

import os
import subprocess
import sys
from pathlib import Path

APP = Path(__file__).parent.parent.parent
SWITCH = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"

PROGRAM = f"""
import threading
from ray._private.ray_constants import env_bool
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.server.superlink.fleet.vce.metrics import VceMetrics
from flwr.supercore.run import Run

class Started(Exception): pass

class Backend:
    def __init__(self, config):
        print("ray would warn:", env_bool("{SWITCH}", True), flush=True)
        raise Started

raybackend.RayBackend = Backend
run = Run.create_empty(7)
try:
    vce_api.start_vce("ray", "{{}}", {str(APP)!r}, False, threading.Event(), run, VceMetrics(),
                      client_app_attr="client_app.app:app", num_supernodes=1)
except RuntimeError:
    pass
"""
"""Program that follows Flower's code for simulated clients until it starts Ray.

The condition of the warning is Ray's own.
"""


def asked(**environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=APP,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ray_is_told_before_it_starts() -> None:
    assert asked() == "ray would warn: False"


def test_whoever_says_otherwise_is_not_overruled() -> None:
    assert asked(**{SWITCH: "1"}) == "ray would warn: True"
