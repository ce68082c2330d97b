"""Approval at a site (``espalier approve``): a person inspects waiting replies and decides on each.

Covers: a person decides on the reply that is shown, and the same reply leaves later, verified by a
hash of all its contents. A file that was changed meanwhile is refused. Each decision is written to
the egress log before it takes effect, with its time and the account that made it.

Does not cover: who may decide. Everybody with write access to the site's state directory can.
"""

import os
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from client_app.policy.approval import log_approval
from client_app.policy.egress_log import now
from espalier.amounts import aligned
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError, tell
from espalier.storage.waiting_replies import Decision, WaitingReplies, WaitingReply, replies_at

COLUMNS = ("id", "site", "run", "method", "round", "kind", "tensors", "bytes", "waiting since")
MIN_OF_ID = 4
"""Minimum number of characters of an abbreviated id."""
SHOWN_TENSORS = 12
"""Maximum number of tensors shown per blob; the log lists all."""

Undecided = list[tuple[WaitingReplies, WaitingReply]]


def waiting_in(root: Path) -> tuple[Undecided, list[EspalierError]]:
    """Return all undecided replies in a state directory, and the errors of unreadable ones."""
    pairs = Undecided()
    damaged = list[EspalierError]()
    for replies in replies_at(root):
        undecided, errors = replies.undecided()
        pairs += [(replies, waiting) for waiting in undecided]
        damaged += errors
    return pairs, damaged


def _chosen(undecided: Undecided, ids: Sequence[str]) -> Undecided:
    """Return the replies whose ids begin with the given characters, each exactly one."""
    chosen = {}
    for word in ids:
        # Short prefixes would match by chance.
        if len(word) < MIN_OF_ID:
            raise InputError(f"approve: {word!r}: give at least {MIN_OF_ID} characters of an id")
        pairs = [pair for pair in undecided if pair[1].id.startswith(word)]
        if len(pairs) != 1:
            raise InputError(
                f"approve: {word!r}: matches {len(pairs)} waiting replies; give the id of one"
                " that is listed"
            )
        chosen[pairs[0][1].id] = pairs[0]
    return list(chosen.values())


def decide(root: Path, pairs: Undecided, approved: bool, reason: str = "") -> Iterator[str]:
    """Decide on replies one after the other, and yield a line for each decision.

    Raises
    ------
    InputError
        This account is not the node's. Or, after all other decisions: another person decided
        meanwhile, a file was changed, or the log or the decision cannot be written.
    """
    # A file of another account could not be read by the node.
    if pairs:
        _require_owner(root)
    decision = Decision(approved, now(), _account(os.geteuid()), reason)
    errors = list[str]()
    for replies, waiting in pairs:
        try:
            # A lock per reply: two people cannot decide at the same time.
            with replies.deciding(waiting):
                _decide(root, replies, waiting, decision)
        except EspalierError as error:
            errors.append(str(error))
        else:
            yield f"{_word(decision):<10} {waiting.id}  {_what(waiting.entry)}"
    if errors:
        raise InputError("\n".join(errors))


def _decide(root: Path, replies: WaitingReplies, waiting: WaitingReply, decision: Decision) -> None:
    """Record the decision in the egress log, then put it into effect."""
    # The files may have changed since they were shown.
    if decision.approved:
        replies.require_as_shown(waiting)
    why = {"reason": decision.reason} if decision.reason else {}
    # The log first: no decision without an entry.
    try:
        log_approval(root, waiting, _word(decision), by=decision.by, **why)
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be written ({error.strerror}); nothing was decided on"
            f" {waiting.id}"
        ) from None
    try:
        replies.decide(waiting, decision)
    except OSError as error:
        raise InputError(
            f"{replies.folder}: cannot be written ({error.strerror}); the log contains"
            f" {_word(decision)!r} for {waiting.id}, but the reply still waits: free some disk"
            " space, and decide again"
        ) from None


def _word(decision: Decision) -> str:
    return "approved" if decision.approved else "refused"


def _account(uid: int) -> str:
    """Return the name of an account, or its number if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _require_owner(root: Path) -> None:
    """Raise InputError unless this account is the node's, which must be able to read decisions."""
    owner = root.stat().st_uid
    user = os.geteuid()
    if owner != user:
        raise InputError(
            f"approve: {root} belongs to {_account(owner)}, but you are {_account(user)}; run the"
            f" command as {_account(owner)}"
        )


def _listed(waiting_replies: Iterable[WaitingReply]) -> list[str]:
    """Return the lines of a table of replies that wait for approval."""
    rows = [COLUMNS]
    for waiting in waiting_replies:
        entry = waiting.entry
        tensors = sum(len(blob["tensors"]) for blob in waiting.blobs)
        rows.append(
            (
                waiting.id, entry["site"], entry["lineage"], entry["method"], str(entry["round"]),
                entry["kind"], str(tensors), f"{waiting.num_bytes:,}", entry["time"],
            )
        )  # fmt: skip
    return aligned(rows)


def _shown(replies: WaitingReplies, waiting: WaitingReply) -> Iterator[str]:
    """Yield a description of all contents of a reply that waits for approval."""
    yield f"{waiting.id}  {_what(waiting.entry)}"
    yield f"sha256 {waiting.digest}, waiting since {waiting.entry['time']}"
    for name, value in sorted(waiting.fields.items()):
        yield f"  {name} = {value}"
    for blob in waiting.blobs:
        file = replies.folder / waiting.id / f"{blob['sha256']}.blob"
        yield (
            f"  {blob['name'] or 'of a further part'}: {blob['bytes']:,} bytes, sha256"
            f" {blob['sha256']}, {file} (safetensors)"
        )
        tensors = list(blob["tensors"].items())
        for name, tensor in tensors[:SHOWN_TENSORS]:
            yield f"    {name}: {tensor['dtype']} {tensor['shape']}"
        if (more := len(tensors) - SHOWN_TENSORS) > 0:
            yield f"    and {more} more"


def _what(entry: Mapping[str, Any]) -> str:
    return (
        f"{entry['kind']} of round {entry['round']}, {entry['method']}, run {entry['lineage']},"
        f" site {entry['site']}"
    )


def main(given: Mapping[str, Any]) -> int:
    """List, show, approve or refuse replies; return 0, or 2 if a step failed."""
    try:
        return _release(at_home(given["state_dir"]), given)
    except EspalierError as error:
        tell(error)
    except OSError as error:
        where = error.filename or given["state_dir"]
        tell(f"approve: {where}: {error.strerror}; run the command as the node's user")
    return 2


def _release(root: Path, given: Mapping[str, Any]) -> int:
    if not root.is_dir():
        raise InputError(
            f"approve: {root}: is not a directory; name the state-dir of the site's node"
        )
    if given["all"] and given["ids"]:
        raise InputError(
            f"approve: {' '.join(given['ids'])} --all: name replies or give --all, not both"
        )
    # Another account cannot read the directory and would find nothing.
    if os.geteuid() != 0:
        _require_owner(root)
    undecided, errors = waiting_in(root)
    # The other replies can still be decided on.
    for error in errors:
        tell(error)
    for replies, waiting in _chosen(undecided, given["show"]):
        print("\n".join(_shown(replies, waiting)))
    # Refusals are chosen first; ``--all`` releases the others only.
    refused = _chosen(undecided, given["refuse"])
    ids = {waiting.id for _, waiting in refused}
    approved = _chosen(undecided, given["ids"])
    if both := sorted(ids & {waiting.id for _, waiting in approved}):
        raise InputError(f"approve: {', '.join(both)}: cannot be both approved and refused")
    if given["all"]:
        approved = [pair for pair in undecided if pair[1].id not in ids]
    # Refusals take effect first.
    for pairs, is_approved in ((refused, False), (approved, True)):
        try:
            for line in decide(root, pairs, is_approved, given["reason"]):
                print(line, flush=True)
        except EspalierError as error:
            tell(error)
            errors.append(error)
    if not (given["show"] or refused or approved) and (undecided or not errors):
        lines = (
            _listed(waiting for _, waiting in undecided)
            if undecided
            else [f"No reply waits in {root}."]
        )
        print("\n".join(lines))
    return 2 if errors else 0
