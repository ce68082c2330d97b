"""Check that an n:m pattern fits every matrix of a model, before anything is sent."""

from espalier.errors import InputError
from espalier.models.plan import ModelPlan
from espalier.settings.pruning import PruningSettings
from espalier.settings.run import RunSettings
from pruning_kernels.selection.comparison_groups import group_size


def require_pattern_fits(plan: ModelPlan, settings: RunSettings) -> None:
    """Check that a pattern divides the rows of every matrix, and the columns of a SparseGPT step.

    Raises
    ------
    InputError
        It does not. The message names the method's pattern and the matrix.
    """
    job = settings.of(PruningSettings)
    for linear in (linear for block in plan.blocks for linear in block.linears):
        try:
            size = group_size(linear.shape, job.server_group)
        except ValueError as error:
            raise InputError(
                f"{settings.method}.pattern = '{job.pattern}': {linear.parameter}: {error}"
            ) from None
        if job.pattern and job.columns_together % size:
            raise InputError(
                f"{settings.method}.pattern = '{job.pattern}': sparsegpt decides"
                f" {job.columns_together} columns at a time, which {size} does not divide; choose"
                " another pattern or local-method"
            )
