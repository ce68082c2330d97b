"""Dry run of a SuperNode's configuration against a run's (``espalier check-node``).

The check reads everything that the node would read, prints its findings, and reports progress if it
takes long.

Covers: the findings are shown only on this terminal.

Does not cover: what the run would send, and memory and disk space of the work (see
``server_app/estimate/node_fit.py``), whether the SuperLink can be reached, and whether the server
has the same program and model. Their hashes are printed for comparison.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from flwr.app import Context, RecordDict

from client_app.policy.identity import own_key
from client_app.policy.site_policy import amounts, require_allowed, runs_answered
from client_app.protocol.private_answer import budget_of
from client_app.protocol.readiness import require_ready
from client_app.site import Site
from espalier.amounts import count, size
from espalier.environment.paths import at_home
from espalier.errors import InputError, as_command
from espalier.hf.machine.machine_memory import machine_memory
from espalier.identity.code_hash import code_sha256
from espalier.identity.site_keys import fingerprint, public_keys
from espalier.messages.message import UNREAD
from espalier.methods.tuning.adapters.tensors import trained
from espalier.privacy.guarantee import guarantee_of
from espalier.progress import Throttle, progress_listener
from espalier.settings.libraries import require_libraries
from espalier.settings.node import MOST, shortened
from espalier.storage.client_state import private_folder
from espalier.training.sequences import read_client_data

SHOWN = 4
"""Maximum number of tensor names in a line."""
ANY_CLIENT = 0
"""Client number of a site, which reads its own file completely whatever its number."""
HOLDS = {
    "": "no reply needs approval",
    "tensors": "replies with tensors need approval",
    "all": "replies with tensors or numbers need approval",
}


def accepts(site: Site) -> Iterator[str]:
    """Yield the site policy, each limit next to the value that the run requests."""
    node = site.node
    # The amounts do not depend on a message.
    requested = amounts(site, UNREAD)
    yield f"methods {node.allowed_methods or 'all'}; the run's is {site.settings.method}"
    for limit in MOST:
        request = f"; {requested[limit][0]} = {requested[limit][1]:,}" if limit in requested else ""
        if limit == "max_runs":
            # Runs that count for the limit, with those of other servers.
            request = f" within {count(node.keep_days, 'day')}; {len(runs_answered(site)):,} so far"
        yield f"{limit.replace('_', '-')} {node.most(limit):,}{request}"
    model_bytes = node.max_bytes_of_models()
    yield f"models that a run sends: {f'at most {model_bytes:,} bytes' if model_bytes else 'none'}"
    own_text = "may leave" if node.own_text else "do not leave"
    yield (
        f"an answer needs at least {count(node.fewest_tokens(), 'token')}; losses on own text"
        f" {own_text}"
    )
    if node.fewest_groups():
        yield f"and {count(node.min_groups, 'group')} of the field {node.data_group}"
    yield from _secure_sums(site)
    yield from _privacy(site)
    yield f"require-approval: {HOLDS[node.require_approval]}"


def _secure_sums(site: Site) -> Iterator[str]:
    """Yield what the site demands of secure sums, and whose keys it knows."""
    node = site.node
    run = site.settings
    run_sum = f"a sum of {run.num_clients}" if run.federation.secure_sum else "no secure sum"
    minimum = f"{node.min_secure_sum}" if node.min_secure_sum else "no minimum"
    yield f"min-secure-sum: {minimum}; the run has {run_sum}"
    if node.peer_keys:
        peer_keys = public_keys(node.peer_keys, "peer-keys")
        others = sorted(peer_keys.keys() - {site.name})
        names = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
        yield f"peer-keys: {count(len(others), 'other site')}: {names or 'none'}"
    elif run.federation.secure_sum:
        yield "peer-keys: none, so a server that replaces keys could read this site's tensors"
    else:
        yield "peer-keys: none"
    if run.privacy.honest_fraction:
        yield (
            f"max-honest-fraction: {node.max_honest_fraction:g}; the run asks to rely on"
            f" {run.privacy.honest_fraction:g} of the sites"
        )


def _privacy(site: Site) -> Iterator[str]:
    """Yield the site's privacy budget, and what the run would draw on it."""
    node = site.node
    guarantee = guarantee_of(site.settings)
    if guarantee is None:
        return
    budget = budget_of(site)
    spent = budget.spent()
    limit = f"at most {node.max_epsilon:g}" if node.max_epsilon else "no budget"
    yield (
        f"max-epsilon: {limit}; at delta = {node.delta:g} spent {budget.epsilon(spent):.3f}, after"
        f" this run {budget.epsilon(spent, 'this run', guarantee.draws):.3f}"
    )


def device(site: Site) -> Iterator[str]:
    """Yield the device of this site and its memory; raise InputError if there is none."""
    computing = site.computing
    yield (
        f"on {computing.device.type}, {count(computing.threads, 'thread')} of"
        f" {count(os.cpu_count() or 1, 'processor')}"
    )
    total, free = machine_memory()
    yield f"memory of this machine {size(total)}, {size(free)} available"
    if computing.device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(computing.device)
        name = torch.cuda.get_device_name(computing.device)
        yield f"{name}, memory {size(total)}, {size(free)} free"


def look(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the findings on what a node would do; raise InputError if it would refuse the run."""
    # A context without a message: only the configuration is read.
    site = Site.of(Context(0, 0, dict(node_config), RecordDict(), dict(run_config)))
    require_libraries(site.settings)
    # `UNREAD` is a header without a run, because no run exists yet.
    require_allowed(site, UNREAD)
    yield f"site       {site.name}"
    yield f"state      {(folder := private_folder(site.node.state_root()))}"
    # Found out now, not after hours of work.
    _require_writable(folder, "state-dir")
    if site.node.models_dir:
        _require_writable(private_folder(at_home(site.node.models_dir)), "models-dir")
    yield f"program    {code_sha256()[:12]}"
    if site.node.site_key or site.settings.site_keys:
        yield f"site-key   {site.node.site_key}: {fingerprint(own_key(site).public_key())}"
    yield from _under("accepts", accepts(site))
    settings = site.settings
    plan = None
    if not settings.job.NEEDS_BASE_MODEL:
        yield "model      sent by the run's server"
    else:
        model = site.model
        plan = site.model.plan
        yield (
            f"model      {model.directory}: {model.family.name}, {len(plan.blocks)} blocks, hash"
            f" {model.sha256[:12]}"
        )
    yield from _under("computing", device(site))
    require_ready(site)
    if settings.tunes and plan is not None:
        trained(plan, settings)
    yield from _under("data", _data(site))


def _require_writable(folder: Path, key: str) -> None:
    """Raise InputError, with the setting that names the directory, if no file can be made there."""
    # A temporary file, because permissions alone do not tell about read-only disks.
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{key} = {shortened(str(folder))!r}: {error.strerror}; name a directory that this"
            " node can write, and run this check as the node's user"
        ) from error


def _data(site: Site) -> Iterator[str]:
    settings = site.settings
    if not settings.job.NEEDS_BASE_MODEL:
        yield (
            f"{site.node.data_path or 'no file'}; its size can be checked only with the model's"
            " tokenizer"
        )
        return
    yield str(
        site.node.data_path
        or f"no file; the run's: {settings.data.origin} {settings.data.path}".strip()
    )
    yield from read_client_data(settings, site.node, site.model, ANY_CLIENT)


def _under(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines as a block, with a title before the first line."""
    for number, line in enumerate(lines):
        yield f"{'' if number else title:<11}{line}"


@as_command
def main(given: Mapping[str, Any]) -> None:
    """Check the node configuration ``node`` against the run configuration ``run``, both flat."""
    # Progress goes to stderr, findings to stdout.
    with progress_listener(
        Throttle(lambda line: print(f"           {line}", file=sys.stderr, flush=True))
    ):
        for line in look(given["node"], given["run"]):
            print(line, flush=True)
