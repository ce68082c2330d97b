"""Checks of model and settings for FedSpine, before a run starts."""

from espalier.errors import EspalierError, InputError
from espalier.hf.nf4.layout import BLOCK
from espalier.methods.fedspine import FedSpineSettings, trained
from espalier.models.groups import Groups
from espalier.models.plan import ModelPlan
from espalier.models.structure import GROUP_KINDS, group_size, kind_of
from espalier.settings.run import RunSettings


def require_falls(settings: RunSettings) -> None:
    """Refuse a bandit with one training step per round.

    Rewards depend on the decrease of the loss within a round. With one step there is none, and all
    rewards would be 0.
    """
    if settings.of(FedSpineSettings).allocation == "bandit" and settings.training.steps < 2:
        raise InputError(
            f"training.steps = {settings.training.steps}: a bandit learns from how far the loss"
            f" falls within a round; set it to 2 or more, or {settings.method}.allocation to fixed"
            " or random"
        )


def require_share(settings: RunSettings, plan: ModelPlan) -> None:
    """Refuse a pruning ratio that would leave a block without a group of each kind."""
    try:
        Groups.of(plan).reachable(settings.of(FedSpineSettings))
    except EspalierError as error:
        raise InputError(f"{settings.method}.{error}") from None


def require_measured(settings: RunSettings, plan: ModelPlan) -> None:
    """Refuse prunable groups without adapters.

    The importance of a group is computed from the gradients of its adapters.
    """
    adapters = trained(plan, settings)
    of_kind = {kind: list[str]() for kind in GROUP_KINDS}
    for linear in plan.blocks[0].linears:
        of_kind[kind_of(linear.name)[0]].append(linear.name)
    for block in plan.blocks:
        adapted = {adapter.linear.name for adapter in adapters.blocks.get(block.index, ())}
        for kind, names in of_kind.items():
            if not adapted & set(names):
                raise InputError(
                    f"lora.targets = '{settings.lora.targets}', lora.layers ="
                    f" '{settings.lora.layers}': {settings.method} measures {kind} by adapters that"
                    f" lie on them, and block {block.index} has none on {', '.join(names)}; set"
                    " both to all"
                )


def require_whole_nf4_blocks(settings: RunSettings, plan: ModelPlan) -> None:
    """Refuse cuts of an NF4 base whose rows would not be whole NF4 blocks."""
    if settings.training.base != "nf4":
        return
    multiple = settings.of(FedSpineSettings).channel_multiple
    group = group_size(plan, "attn.o", "groups")
    if multiple % BLOCK:
        raise InputError(
            f"{settings.method}.channel-multiple = {multiple}: with training.base = 'nf4' the"
            f" channels that stay have to be a multiple of {BLOCK}; set it to {BLOCK}"
        )
    if group % BLOCK:
        raise InputError(
            f"training.base = 'nf4': a group of attention has {group} features in attn.o, no"
            f" multiple of {BLOCK}, so that the matrix cannot be quantised without it; set"
            " training.base to 'bfloat16'"
        )
