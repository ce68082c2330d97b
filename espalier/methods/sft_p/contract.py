"""Contracts of SFT-P: the shared mask generator, and LoRA if it is trained.

Embedding, masks and budget of a client never leave it.
"""

from dataclasses import replace
from typing import Any

from espalier.messages.contract import Contract
from espalier.messages.message import Kind, MessageBody
from espalier.methods.fedpetuning import contract as fedpetuning
from espalier.methods.fedpetuning.settings import AdapterAveraging
from espalier.methods.sft_p.settings import WIDTH, SftPSettings
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.mask_generator import GeneratorShape
from espalier.models.plan import ModelPlan, PlanOf
from espalier.settings.run import RunSettings


def shape_of(run: RunSettings) -> GeneratorShape:
    """Return the sizes of the generator that the settings describe."""
    job = run.of(SftPSettings)
    return GeneratorShape(job.embedding, job.code, WIDTH, job.heads)


def lora_plan(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """Return the LoRA adapters that are trained with the masks; none without ``adapters``."""
    adapters = adapter_plan(plan, run.of(AdapterAveraging).lora_of(run.lora, len(plan.blocks)))
    adapters = adapters if rank_limit is None else adapters.limited(rank_limit)
    return adapters if run.of(SftPSettings).adapters else replace(adapters, blocks={})


def trained(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """Return all shared tensors: LoRA, and the generator's tensors, which are trained whole."""
    return replace(lora_plan(plan, run, rank_limit), whole=shape_of(run).shapes(plan))


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    return replace_observer(
        fedpetuning.training_contract(request, plan_of, run, fedpetuning.Order, trained)
    )


def delivery(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``deliver`` message with a part of the generator and LoRA.

    After the last round, each client makes its personal model from them.
    """
    return fedpetuning.delivery_of(request, plan_of, run, trained)


def replace_observer(contract: Contract) -> Contract:
    """Return the contract with this method's observer sentence in place of the common one."""
    return (
        replace(contract, observer=OBSERVER)
        if contract.observer == fedpetuning.OBSERVER
        else contract
    )


largest_orders = fedpetuning.largest_orders
sizes_vary = fedpetuning.sizes_vary
OBSERVER = (
    "A generator of masks, and LoRA if it is trained. Their differences from what was sent to the"
    " client are sums of the optimiser's steps on its data, at its own masks. As with LoRA,"
    " training text can be recovered in part. More tokens (the site's `min-tokens`) and more"
    " steps make this harder, not impossible. The distance of the masks from the client's budget"
    " moves the generator, so the budget can be guessed. With `client-weights` = `samples` only:"
    " the number of training sequences. Also how many steps failed, and how long the training took."
)

EXAMPLES: dict[Kind, dict[str, Any]] = fedpetuning.EXAMPLES
"""Example fields by kind; the contract of the kind depends on them."""
