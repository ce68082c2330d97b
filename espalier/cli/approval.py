"""``espalier release`` and ``espalier check-log``: approval of replies and check of the egress log.

A person at a site runs them; the node need not be stopped.
"""

import argparse
from typing import Any

from espalier.launch.app_folder import installed_app
from espalier.launch.app_process import run_in_app

RELEASE = "release"
CHECK_LOG = "check-log"


def add_approval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands to the parser."""
    release = commands.add_parser(
        RELEASE,
        help="list the replies that wait for approval (hold-replies), and release or refuse them",
    )
    release.add_argument("state_dir", metavar="STATE-DIR", help="the node's state-dir")
    release.add_argument(
        "ids", nargs="*", metavar="ID", help="beginning of the id of a reply to release"
    )
    release.add_argument(
        "--all",
        action="store_true",
        help="release all replies that wait now, except those that are refused",
    )
    release.add_argument(
        "--refuse",
        action="append",
        default=[],
        metavar="ID",
        help="id of a reply that must not leave",
    )
    release.add_argument(
        "--reason",
        default="",
        metavar="TEXT",
        help="reason for a refusal; it is written to the site's log",
    )
    release.add_argument(
        "--show",
        action="append",
        default=[],
        metavar="ID",
        help="show the content of a reply, and its files",
    )
    release.set_defaults(execute=run_approval)
    check = commands.add_parser(CHECK_LOG, help="verify the log of what left a site")
    check.add_argument(
        "where",
        metavar="FILE | STATE-DIR",
        help="a log, or a state-dir with logs in egress/",
    )
    check.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="HASH",
        help="a hash that was noted earlier and must be in the log",
    )
    check.set_defaults(execute=run_approval)


def run_approval(given: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises
    ------
    InputError
        The app is not found.
    """
    document: dict[str, Any]
    if given.command == RELEASE:
        keys = ("state_dir", "ids", "all", "refuse", "reason", "show")
        module = "client_app.policy.approval_command"
        document = {key: getattr(given, key) for key in keys}
    else:
        module = "client_app.policy.log_check"
        document = {"where": given.where, "heads": given.head}
    return run_in_app(installed_app(), module, document)
