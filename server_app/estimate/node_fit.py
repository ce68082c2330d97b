"""Replies that a run would ask of a node, and its memory and disk needs (``espalier check-node``).

The needs are compared with the machine.

Covers: the estimate for the run's settings and the model at this node (docs/studies/plan.md). On a
CUDA device, the memory is that of the same work on a CPU, without libraries. The host's own memory
is not compared then.

Does not cover: CUDA's context and kernels on the device; the work on a model that the server
pushes; files of an earlier run that this one will use again, which count twice; memory and disk
needs of other programs, and of other runs at this node.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from client_app.site import Site
from espalier.amounts import size as as_size
from espalier.environment.paths import at_home
from espalier.errors import InputError, as_command
from espalier.hf.machine.machine_memory import machine_memory
from espalier.models.plan import ModelPlan
from espalier.settings.node import NodeSettings, parse_node
from espalier.settings.run import parse
from espalier.settings.top_level import DEFAULT_METHOD
from server_app.estimate.estimate import Plan, in_words
from server_app.estimate.messages.replies import Outlook, outlook, outlook_without_model
from server_app.estimate.node_sends import sends
from server_app.estimate.work.memory import Memory
from server_app.estimate.work.work import OWN_MODEL

OWN = ("activations", "device")
"""Settings that a node may choose itself."""


def planned(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on what a client sends, and on its memory and disk needs at this node.

    Raises InputError if a setting is invalid, the model cannot be opened, or the work needs more
    than there is.
    """
    node = parse_node(node_config)
    settings = parse(run_config)
    if not settings.job.NEEDS_BASE_MODEL:
        yield from _sent(outlook_without_model(settings))
        yield (
            "memory     depends on the model that the run's server sends; espalier plan on the"
            " server's machine shows it"
        )
        size = 2 * (node.max_bytes_of_models() or 0)
        yield from on_disks(node, {"models that runs send, twice while one arrives": size})
        return
    overrides = {name: getattr(node, name) for name in OWN if getattr(node, name)}
    settings = settings.model_copy(update=overrides)
    plan = Plan(settings, Site(run_config, node).model, simulation=False)
    yield from _sent(outlook(plan.traffic), plan.model.plan)
    on_device = settings.device == "cuda" or (
        settings.device == "auto" and torch.cuda.is_available()
    )
    yield f"memory     {memory_line(plan.client, on_device=on_device)}"
    yield from on_disks(node, plan.client_disk)


def _sent(expected: Outlook, plan: ModelPlan | None = None) -> Iterator[str]:
    for number, line in enumerate(sends(expected, plan)):
        yield f"{'' if number else 'sends':<11}{line}"


def on_disks(node: NodeSettings, parts: Mapping[str, int]) -> Iterator[str]:
    """Yield lines on the disk space that the work needs, and on the free space.

    ``parts`` are bytes by kind of content. Raises InputError if the free space does not suffice.
    """
    root = node.state_root()
    private = {name: size for name, size in parts.items() if name != OWN_MODEL}
    yield f"disk       {_on_disk('state-dir', root, private)}"
    if node.models_dir and OWN_MODEL in parts:
        models = at_home(node.models_dir)
        # Two folders on one disk share its free space.
        same = _existing(models).stat().st_dev == _existing(root).stat().st_dev
        others = sum(private.values()) if same else 0
        yield f"           {_on_disk('models-dir', models, {OWN_MODEL: parts[OWN_MODEL]}, others)}"


def _existing(folder: Path) -> Path:
    """Return the folder, or its closest parent that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _on_disk(key: str, folder: Path, parts: Mapping[str, int], others: int = 0) -> str:
    """Return a line on one folder; ``others`` are bytes needed on the same disk for other folders.

    Raises InputError if the free space does not suffice.
    """
    needed = sum(parts.values())
    free = max(0, shutil.disk_usage(_existing(folder)).free - others)
    what = in_words(parts) or "hardly anything"
    if needed > free:
        raise InputError(
            f"{key} = {str(folder)!r}: {as_size(free)} are free, and the run keeps about"
            f" {as_size(needed)} there ({what}); free it, or name another directory"
        )
    return f"about {as_size(needed)} in {folder} ({what}), where {as_size(free)} are free"


def memory_line(memory: Memory, *, on_device: bool) -> str:
    """Return a line on a client's memory; for a CUDA device it excludes libraries.

    Raises InputError if the machine or the device has less memory.
    """
    libraries = 0 if on_device else memory.libraries
    # ``machine_memory`` has them in the other order.
    free, total = torch.cuda.mem_get_info() if on_device else machine_memory()[::-1]
    peak = libraries + memory.largest.num_bytes
    where = "the device" if on_device else "this machine"
    parts = in_words({"libraries": libraries, **memory.largest.parts})
    line = (
        f"about {as_size(peak)} of {where} at the peak of the work ({memory.largest.name}: {parts})"
    )
    if peak > total:
        raise InputError(
            f"memory: the work takes {line}; there are {as_size(total)}. Choose a larger machine,"
            " or a run with smaller batches or shorter samples, training.base = 'nf4', or"
            " activations = 'disk'"
        )
    if on_device:
        line += "; CUDA's own context comes on top"
    if peak > free:
        line += f"; that is more than the {as_size(free)} that are free now"
    return line


@as_command
def main(document: Mapping[str, Any]) -> None:
    """Print the lines for the configurations ``node`` and ``run``, both flat."""
    for line in planned(document["node"], document["run"]):
        print(line, flush=True)
    print(
        "\nThe node can take part in such a run (method"
        f" {document['run'].get('method', DEFAULT_METHOD)})."
    )
