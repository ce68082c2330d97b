"""Dry run of a SuperNode's configuration against a run's (``espalier check-node``).

The check reads everything that the node would read, prints its findings, and reports progress if it
takes long.

Covers: the findings are shown only on this terminal.

Does not cover: memory and disk space of the work (the estimate of the run covers them), whether the
SuperLink can be reached, and whether the server has the same program and model. Their hashes are
printed for comparison.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Context, RecordDict

from client_app.node.node_report import accepts, device, sends
from client_app.policy.identity import own_key
from client_app.policy.site_policy import require_allowed
from client_app.protocol.readiness import require_ready
from client_app.site import Site
from espalier.environment.home_folder import at_home
from espalier.errors import EspalierError
from espalier.identity.code_hash import code_sha256
from espalier.identity.site_keys import fingerprint
from espalier.messages.message import UNREAD
from espalier.messages.reply_estimate import outlook
from espalier.methods.fedpetuning import trained
from espalier.progress.beats import Pace, heard_by
from espalier.settings.libraries import require_libraries
from espalier.storage.client_state import private_folder, require_writable
from espalier.training.client_data import read_client_data

ANY_CLIENT = 0
"""Client number of a site, which reads its own file completely whatever its number."""


def look(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Iterator[str]:
    """Go through everything that a node would do in a run, and yield the findings line by line.

    Raises
    ------
    InputError
        The node would refuse the run, for the reason given.
    """
    site = Site.of(Context(0, 0, dict(node_config), RecordDict(), dict(run_config)))
    require_libraries(site.settings)
    # `UNREAD` is a header without a run, because no run exists yet.
    require_allowed(site, UNREAD)
    yield f"site       {site.name}"
    yield f"state      {(folder := private_folder(site.node.state_root()))}"
    require_writable(folder, "state-dir")
    if site.node.models_dir:
        require_writable(private_folder(at_home(site.node.models_dir)), "models-dir")
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
    expected = outlook(plan, settings)
    yield from _under("sends", sends(expected, plan))


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
        or f"no file; the run's: {settings.data.source} {settings.data.path}".strip()
    )
    yield from read_client_data(settings, site.node, site.model, ANY_CLIENT)


def _under(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines as a block, with a title before the first line."""
    for number, line in enumerate(lines):
        yield f"{'' if number else title:<11}{line}"


def main(given: Mapping[str, Any]) -> int:
    """Check the node configuration ``node`` against the run configuration ``run``, both flat.

    Returns
    -------
    int
        0 if the node would accept the run, 2 if it would refuse it.
    """
    try:
        with heard_by(Pace(lambda line: print(f"           {line}", file=sys.stderr, flush=True))):
            for line in look(given["node"], given["run"]):
                print(line, flush=True)
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return 2
    return 0
