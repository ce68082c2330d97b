"""While a handler works: this client counts as at work where it shares a machine, and tells how far it is.

A simulated client's lines go to the server, which is on the same machine and shows them; those of a site go to its node's log,
and nowhere else.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from client_app.site import Site
from espalier.pace.beats import Pace, heard_by
from espalier.storage.at_work import AtWork
from espalier.wire.messages import Header


@contextmanager
def at_work(site: Site, header: Header) -> Iterator[None]:
    """Be at work on a message until the end of the block."""
    with ExitStack() as stack:
        if site.node.simulated:
            work = AtWork(site.node.state_root(), header.lineage)
            stack.enter_context(work.working())
            say = work.say
        else:
            say = _log
        stack.enter_context(
            heard_by(Pace(lambda line: say(f"{site.name:<12} {header.kind}: {line}")))
        )
        yield


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
