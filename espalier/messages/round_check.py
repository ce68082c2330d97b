"""Check of the round of a request against the settings and the model.

Covers: a client works for no round beyond those of the run, for all methods and kinds of messages.
Does not cover: additional rounds of FedSpaLLM. A site cannot know if they are needed; its
``max-rounds`` limits them.
"""

from espalier.errors import ProtocolError
from espalier.messages.message import Header
from espalier.models.plan import PlanOf
from espalier.settings.run import RunSettings


def last_rounds(plan_of: PlanOf, run: RunSettings) -> range:
    """Return the rounds after which a run may end; the plan is read only if they depend on it."""
    return run.job.last_rounds(run.federation, lambda: len(plan_of().blocks), run.num_clients)


def require_round(header: Header, ends: range, run: RunSettings) -> None:
    """Check that a request of this kind exists in its round.

    Parameters
    ----------
    header
        Header of the request.
    ends
        Rounds after which the run may end. They are not used for requests before the first round.
    run
        Settings of the run.

    Raises
    ------
    ProtocolError
        If there is no such request in this round; the error names the last round.
    """
    if header.kind in ("enrol", "refused"):
        if header.server_round != 0:
            what = "an enrol" if header.kind == "enrol" else "a refused"
            raise ProtocolError(
                f"message: {what} of round {header.server_round} does not exist, it comes before"
                " the first round"
            )
        return
    if header.kind in ("alone", "evaluate"):
        allowed = ends
    elif header.kind == "deliver":
        # The result is pushed with the number of the round after the last one.
        allowed = range(run.job.FIRST_DELIVERY, ends[-1] + 2)
    else:
        allowed = range(1, ends[-1] + 1)
    if header.server_round not in allowed:
        what = (
            f"round {ends[0]}" if len(ends) == 1 else f"one of the rounds {ends[0]} to {ends[-1]}"
        )
        raise ProtocolError(
            f"message: a {header.kind} of round {header.server_round} does not exist, the run ends"
            f" with {what}"
        )
