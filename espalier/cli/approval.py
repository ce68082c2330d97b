"""``espalier release`` and ``espalier check-log``: approval of replies and check of the egress log.

A person at a site runs them; the node need not be stopped.
"""

import argparse

from espalier.launch.app import installed_app, run_in_app

RELEASE = "client_app.policy.approval_command"
"""Module of the app that lists, approves and refuses replies."""
CHECK_LOG = "client_app.policy.egress_log"
"""Module of the app that verifies egress logs."""


def add_release(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``espalier release`` to the parser."""
    parser = commands.add_parser(
        "release",
        help="list the replies that wait for approval (require-approval), and release or refuse them",
    )
    parser.add_argument("state_dir", metavar="STATE-DIR", help="the node's state-dir")
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="beginning of the id of a reply to release"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="release all replies that wait now, except those that are refused",
    )
    parser.add_argument(
        "--refuse",
        action="append",
        default=[],
        metavar="ID",
        help="id of a reply that must not leave",
    )
    parser.add_argument(
        "--reason",
        default="",
        metavar="TEXT",
        help="reason for a refusal; it is written to the site's log",
    )
    parser.add_argument(
        "--show",
        action="append",
        default=[],
        metavar="ID",
        help="show the content of a reply, and its files",
    )
    parser.set_defaults(execute=release)


def add_check_log(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``espalier check-log`` to the parser."""
    parser = commands.add_parser("check-log", help="verify the log of what left a site")
    parser.add_argument(
        "where", metavar="FILE | STATE-DIR", help="a log, or a state-dir with logs in egress/"
    )
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="HASH",
        help="a hash that was noted earlier and must be in the log",
    )
    parser.set_defaults(execute=check_log)


def release(given: argparse.Namespace) -> int:
    """List, show, approve or refuse replies, and return the exit code."""
    keys = ("state_dir", "ids", "all", "refuse", "reason", "show")
    return run_in_app(installed_app(), RELEASE, {key: getattr(given, key) for key in keys})


def check_log(given: argparse.Namespace) -> int:
    """Verify egress logs, and return the exit code."""
    return run_in_app(installed_app(), CHECK_LOG, {"where": given.where, "heads": given.head})
