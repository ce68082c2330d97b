"""Which rounds a run has, and in which of them there is a message of some kind: as the settings and the model say.

Covers: a client is asked for no round beyond those of the run, whatever the method and the kind of message.
Does not cover: FedSpaLLM's further rounds, of which a site cannot know whether they are needed; there are few.
"""

from espalier.settings.mistakes import Mistake
from espalier.settings.run import METHODS, RunSettings
from espalier.wire.messages import Header
from espalier.wire.plan import ModelPlan


def last_rounds(plan: ModelPlan, run: RunSettings) -> range:
    """The rounds after which a run may end.

    FedSpaLLM goes on while a layer is not pruned. Each further round finishes one at least, unless the clients that sampled it
    are lost in that round, and a client is lost once.
    """
    if run.method == "fedprllm":
        last = 1 if run.fedprllm.strategy == "one-shot" else len(plan.blocks)
        return range(last, last + 1)
    more = len(plan.blocks) + run.num_clients if run.method == "fedspallm" else 0
    return range(run.job.rounds, run.job.rounds + more + 1)


def require_round(header: Header, plan: ModelPlan, run: RunSettings) -> None:
    """Refuse a request of a round in which there is none.

    Raises
    ------
    Mistake
        It names the rounds of the run.
    """
    ends = last_rounds(plan, run)
    if header.kind == "enrol":
        allowed = range(1)
    elif header.kind in ("alone", "evaluate"):
        allowed = ends
    elif header.kind == "deliver":  # the result comes as if it were for one round more; the first adapters come from the seed
        allowed = range(2 if "lora" in METHODS[run.method] else 1, ends[-1] + 2)
    else:
        allowed = range(1, ends[-1] + 1)
    if header.server_round not in allowed:
        what = f"round {ends[0]}" if len(ends) == 1 else f"one of the rounds {ends[0]} to {ends[-1]}"
        raise Mistake(f"message: a {header.kind} of round {header.server_round} does not exist, the run ends with {what}")
