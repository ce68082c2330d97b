"""Find the contract of a message: a function of its header, the model plan and the run's settings."""

from types import ModuleType

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire import enrolment, evaluation, fedprllm, fedspallm, tuning
from espalier.wire.contract import Contract
from espalier.wire.messages import Letter, validate
from espalier.wire.plan import ModelPlan

METHODS: dict[str, ModuleType] = {"fedpetuning": tuning, "fedprllm": fedprllm, "fedspallm": fedspallm, "hetlora": tuning}
"""The module that holds each method's contracts: ``contract`` of train and fetch, and ``delivery``."""


def contract_for(request: Letter, plan: ModelPlan, settings: RunSettings) -> Contract:
    """The contract that a request and its reply are held against.

    Raises
    ------
    Mistake
        The request speaks of another method, or asks for a part that does not exist.
    """
    header = request.header
    if header.method != settings.method:
        raise Mistake(f"message: is of method {header.method!r}, the run's is {settings.method!r}")
    if header.kind == "enrol":
        return enrolment.contract(settings.method)
    if header.kind == "evaluate":
        return evaluation.contract(settings.method, validate(evaluation.Texts, request.scalars), settings.evaluation.own_text)
    if header.kind == "deliver":
        delivery: Contract = METHODS[settings.method].delivery(request, plan, settings)
        return delivery
    contract: Contract = METHODS[settings.method].contract(request, plan, settings)
    return contract
