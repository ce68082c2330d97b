"""Resident memory after imports, for each kind of process.

    python -m benchmarks.plan.libraries

The figures are constants of ``server_app/estimate/work/memory.py``. Those of an idle SuperLink and
SuperNode come from ``/proc/PID/status`` of such processes.
"""

import subprocess
import sys
from pathlib import Path

COMMON = """
import torch
from pathlib import Path
from espalier.hf.opening.opened_model import open_model
from flwr.clientapp import ClientApp
open_model("demo").new_skeleton()
open_model("demo").tokenizer
torch.ones(512, 512) @ torch.ones(512, 512)
"""
COMPILE = """
import torch
from pruning_kernels.selection.local_pruning import LocalPruning
LocalPruning("wanda", 0.5, "row").prune_mask(torch.zeros(1024, 1024), torch.ones(1024))
"""
"""Code that compiles kernels, or reads them from their cache."""
IMPORTS = {
    "client": "import client_app.methods.pruning.slicegpt",
    "pruning client": f"import client_app.methods.pruning.fedprllm\n{COMPILE}",
    "tuning client": "import peft, client_app.methods.tuning.fedpetuning",
    "nf4 client": "import peft, bitsandbytes, client_app.methods.tuning.fedpetuning",
    "server": (
        "import server_app.app, strategies.pruning.slicegpt, server_app.artifacts.structured_model"
    ),
    "pruning server": (
        "import server_app.app, strategies.pruning.fedprllm, server_app.artifacts.pruned_model"
        f"\n{COMPILE}"
    ),
    "tuning server": (
        "import peft, server_app.app, strategies.tuning.fedpetuning, server_app.artifacts.adapters"
    ),
}
TELL = 'print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)'


def main() -> None:
    """Run the measurement and print a line per kind."""
    for kind, imports in IMPORTS.items():
        program = f"{imports}\n{COMMON}\n{TELL}"
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path.cwd(),
        )
        print(f"{kind:<14} {int(done.stdout.splitlines()[-1]) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
