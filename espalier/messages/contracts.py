"""Lookup of the contract of a message by its header, the model plan and the settings of the run."""

from dataclasses import replace
from types import ModuleType

from espalier.errors import ProtocolError
from espalier.messages import enrolment, evaluation, local_baseline
from espalier.messages.contract import Contract
from espalier.messages.message import MessageBody, validate
from espalier.messages.parts import last_rounds, require_round
from espalier.messages.sums import secure_sum
from espalier.models.plan import PlanOf
from espalier.settings.registry import METHODS, part
from espalier.settings.run import RunSettings


def of_method(method: str) -> ModuleType:
    """Import and return the module with the contracts of a method."""
    module: ModuleType = part(METHODS[method].contracts_module)
    return module


def contract_for(request: MessageBody, plan_of: PlanOf, settings: RunSettings) -> Contract:
    """Return the contract of a request and its reply.

    Raises ProtocolError if the request names another method, or a round or part that does not
    exist.

    Parameters
    ----------
    plan_of : function that returns the plan of the clients' model. It is called only if the
        contract depends on the plan, so that a site without the model can take part.
    """
    header = request.header
    # A message of another method would be checked against the wrong contract.
    if header.method != settings.method:
        raise ProtocolError(
            f"message: is of method {header.method!r}, the run's is {settings.method!r}"
        )
    if header.kind in ("enrol", "refused"):
        require_round(header, range(0), settings)
        if header.kind == "refused":
            return enrolment.refused_contract(settings.method)
        return enrolment.contract(settings.method, signed=bool(settings.site_keys))
    # Rounds and parts that do not exist are refused before a contract is built.
    require_round(header, last_rounds(plan_of, settings), settings)
    if header.kind == "local_baseline":
        return local_baseline.contract(request, settings)
    if header.kind == "evaluate":
        # The fields say which texts are in the blobs.
        texts = validate(evaluation.Texts, request.fields)
        evaluation_contract = evaluation.contract(
            settings.method, texts, settings.evaluation.own_text
        )
        evaluation.require_of_run(texts, settings)
        return evaluation_contract
    if header.kind == "push":
        push: Contract = of_method(settings.method).push_contract(request, plan_of, settings)
        return push
    if header.kind in secure_sum.KINDS:
        return secure_sum.contract(request, plan_of, settings)
    plain = plain_contract(request, plan_of, settings)
    # With secure sums the tensors of ``train`` stay at the site.
    if not settings.federation.secure_sum:
        return plain
    if header.kind == "fetch":
        raise ProtocolError("message: tensors stay at the site (federation.secure-sum)")
    return secure_sum.train_contract(plain)


def plain_contract(request: MessageBody, plan_of: PlanOf, settings: RunSettings) -> Contract:
    """Return the contract of a ``train`` or ``fetch`` whose tensors are not summed secretly."""
    if settings.federation.secure_sum:
        # The method's contract may depend on its fields, of which the session is none.
        fields = {
            name: value for name, value in request.fields.items() if name != secure_sum.SESSION
        }
        request = replace(request, fields=fields)
    contract: Contract = of_method(settings.method).contract(request, plan_of, settings)
    return contract
