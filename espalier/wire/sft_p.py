"""Contracts of SFT-P: the shared generator of masks, and LoRA where it is trained; embedding, masks and budget never travel."""

from dataclasses import replace
from typing import Any

from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.run import RunSettings
from espalier.settings.sft_p import SftPSettings
from espalier.wire import tuning
from espalier.wire.adapters import AdapterPlan, adapter_plan
from espalier.wire.contract import Contract
from espalier.wire.mask_generator import GeneratorShape
from espalier.wire.messages import Kind, Letter
from espalier.wire.plan import ModelPlan, PlanOf


def shape_of(run: RunSettings) -> GeneratorShape:
    """The generator that the settings describe."""
    job = run.of(SftPSettings)
    return GeneratorShape(job.embedding, job.code, job.width, job.heads)


def lora_plan(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """LoRA that is trained beside the masks; none without ``adapters``."""
    adapters = adapter_plan(plan, run.of(AdapterAveraging).lora_of(run.lora, len(plan.blocks)))
    adapters = adapters if rank_limit is None else adapters.limited(rank_limit)
    return adapters if run.of(SftPSettings).adapters else replace(adapters, blocks={})


def trained(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """All that is shared: LoRA, and the generator's tensors, which are trained whole."""
    return replace(lora_plan(plan, run, rank_limit), whole=shape_of(run).shapes(plan))


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part."""
    return replace_observer(tuning.training_contract(request, plan_of, run, tuning.Order, trained))


def delivery(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``deliver``: a part of generator and LoRA; after the last round each client makes its model of them."""
    return tuning.delivery_of(request, plan_of, run, trained)


def replace_observer(contract: Contract) -> Contract:
    """The same with what somebody learns who reads the reply."""
    return (
        replace(contract, observer=OBSERVER) if contract.observer == tuning.OBSERVER else contract
    )


largest_orders = tuning.largest_orders
sizes_vary = tuning.sizes_vary
OBSERVER = (
    "a generator of masks, and LoRA where it is trained, whose differences from those that were"
    " sent are sums of the optimiser's steps over this client's data, at masks of its own: as of"
    " LoRA, text can be recovered in part, and more tokens (the site's `least-tokens`) and steps"
    " make it harder, not impossible; how far the masks are from the client's budget moves the"
    " generator, so that its budget can be guessed; with `client-weights` = `samples` alone, how"
    " many training sequences it has; how many steps failed; and how long it took"
)

EXAMPLES: dict[Kind, dict[str, Any]] = tuning.EXAMPLES
"""Scalars of requests by kind: what the contracts of the kind depend on."""
