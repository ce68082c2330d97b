"""The memory that a client's work takes, beside what its machine has; ``espalier check-node`` ends with it.

Covers: the plan's figure for the run's settings and the model at this node, which is an estimate (docs/studies/plan.md). On a
CUDA device it is what the same work holds on a CPU, without libraries; the host's own memory is not compared then.
Does not cover: what CUDA's context and kernels take on the device; a model that the run's server brings; other programs, and
other runs at this node, that want memory too.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from espalier.modeling.machine_memory import machine_memory
from espalier.modeling.opened import open_model
from espalier.settings.mistakes import Mistake
from espalier.settings.node import parse_node
from espalier.settings.run import DEFAULT_METHOD, parse
from server_app.planning.memory import Memory
from server_app.planning.plan import Plan, as_size

OWN = ("activations", "device")
"""What a node may choose for itself."""


def planned(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> str:
    """A line for people about what a client's process holds at this node.

    Raises
    ------
    Mistake
        A setting is wrong, the model cannot be opened, or the work takes more than the machine has.
    """
    node, settings = parse_node(node_config), parse(run_config)
    if not settings.job.NEEDS_BASE_MODEL:
        return "the model that the run's server brings decides; espalier plan says it there"
    settings = settings.model_copy(update={name: getattr(node, name) for name in OWN if getattr(node, name)})
    model = open_model(node.model_path or settings.model)
    on_device = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    return told(Plan(settings, model, simulation=False).client, on_device=on_device)


def told(memory: Memory, *, on_device: bool) -> str:
    """The same of a client's memory, which on a CUDA device has no libraries in it.

    Raises
    ------
    Mistake
        It is more than there is.
    """
    libraries, (free, total) = (0, torch.cuda.mem_get_info()) if on_device else (memory.libraries, machine_memory()[::-1])
    peak, where = libraries + memory.largest.num_bytes, "the device" if on_device else "this machine"
    parts = {"libraries": libraries, **memory.largest.parts}
    largest = ", ".join(f"{name} {as_size(size)}" for name, size in parts.items() if size)
    line = f"about {as_size(peak)} of {where} at the peak of the work ({memory.largest.name}: {largest})"
    if peak > total:
        raise Mistake(
            f"memory: the work takes {line}; there are {as_size(total)}. Choose a larger machine, or a run with smaller "
            "batches or shorter windows, training.base = 'nf4', or activations = 'disk'"
        )
    line += "; CUDA's own context comes on top" if on_device else ""
    return line if peak <= free else f"{line}; that is more than the {as_size(free)} that are free now"


def main(document: Mapping[str, Any]) -> int:
    """Print the line for the configurations ``node`` and ``run``, both flat; 2 if it does not fit."""
    try:
        print(f"memory     {planned(document['node'], document['run'])}", flush=True)
    except Mistake as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    print(f"\nThe node can take part in such a run (method {document['run'].get('method', DEFAULT_METHOD)}).")
    return 0
