"""Which rounds a run has, and in which of them there is a message of some kind: as the settings and the model say.

Covers: a client is asked for no round beyond those of the run, whatever the method and the kind of message.
Does not cover: FedSpaLLM's further rounds, of which a site cannot know whether they are needed; its ``most-rounds``
counts them.
"""

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.messages import Header
from espalier.wire.plan import PlanOf


def last_rounds(plan_of: PlanOf, run: RunSettings) -> range:
    """The rounds after which a run may end, as its method says; the plan is asked for where that depends on it."""
    return run.job.last_rounds(run.federation, lambda: len(plan_of().blocks), run.num_clients)


def require_round(header: Header, ends: range, run: RunSettings) -> None:
    """Refuse a request of a round in which there is none.

    Parameters
    ----------
    ends : the rounds after which the run may end; of what comes before the first round nobody asks

    Raises
    ------
    Mistake
        It names the rounds of the run.
    """
    if header.kind in ("enrol", "refused"):
        if header.server_round != 0:
            what = "an enrol" if header.kind == "enrol" else "a refused"
            raise Mistake(
                f"message: {what} of round {header.server_round} does not exist, it comes before"
                " the first round"
            )
        return
    if header.kind in ("alone", "evaluate"):
        allowed = ends
    elif header.kind == "deliver":  # the result comes as if it were for one round more
        allowed = range(run.job.FIRST_DELIVERY, ends[-1] + 2)
    else:
        allowed = range(1, ends[-1] + 1)
    if header.server_round not in allowed:
        what = (
            f"round {ends[0]}" if len(ends) == 1 else f"one of the rounds {ends[0]} to {ends[-1]}"
        )
        raise Mistake(
            f"message: a {header.kind} of round {header.server_round} does not exist, the run ends"
            f" with {what}"
        )
