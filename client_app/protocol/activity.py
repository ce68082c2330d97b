"""Activity of a client while one of its handlers works.

The client is registered as active among the clients of its machine, and reports progress. The
server is on the same machine as its simulated clients and shows their progress lines. The lines of
a site are written to the log of its node, and nowhere else.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from client_app.site import Site
from espalier.messages.message import Header
from espalier.progress.beats import Pace, heard_by
from espalier.storage.activity import AtWork


@contextmanager
def at_work(site: Site, header: Header) -> Iterator[None]:
    """Register the client as active, and report progress, until the end of the ``with`` block."""
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
