"""Find the contract of a message: a function of its header, the model plan and the run's settings."""

from types import ModuleType

from espalier.settings.methods import METHODS, part
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire import alone, enrolment, evaluation, refusal
from espalier.wire.contract import Contract
from espalier.wire.messages import Letter, validate
from espalier.wire.plan import PlanOf
from espalier.wire.rounds_of_run import last_rounds, require_round


def of_method(method: str) -> ModuleType:
    """A method's contracts, imported when they are needed: those of methods that tune take torch, others do not."""
    found: ModuleType = part(METHODS[method].contracts)
    return found


def contract_for(request: Letter, plan_of: PlanOf, settings: RunSettings) -> Contract:
    """The contract that a request and its reply are held against.

    Parameters
    ----------
    plan_of : gives the plan of the model that clients work on; a contract asks for it where it depends on it, so that a site
        may take part which does not have that model yet

    Raises
    ------
    Mistake
        The request speaks of another method, or asks for a round or part that does not exist.
    """
    header = request.header
    if header.method != settings.method:
        raise Mistake(f"message: is of method {header.method!r}, the run's is {settings.method!r}")
    if header.kind == "enrol":
        require_round(header, range(0), settings)
        return enrolment.contract(settings.method, signed=bool(settings.site_keys))
    if header.kind == "refused":
        require_round(header, range(0), settings)
        return refusal.contract(settings.method)
    require_round(header, last_rounds(plan_of, settings), settings)
    if header.kind == "alone":
        return alone.contract(request, settings)
    if header.kind == "evaluate":
        texts = validate(evaluation.Texts, request.scalars)
        made = evaluation.contract(settings.method, texts, settings.evaluation.own_text)
        evaluation.require_of_run(texts, settings)
        return made
    if header.kind == "deliver":
        delivery: Contract = of_method(settings.method).delivery(request, plan_of, settings)
        return delivery
    contract: Contract = of_method(settings.method).contract(request, plan_of, settings)
    return contract
