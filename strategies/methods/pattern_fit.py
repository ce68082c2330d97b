"""Whether an n:m pattern fits every matrix of a model; known before anything is sent."""

from espalier.settings.fedprllm import FedPrLLMSettings
from espalier.settings.fedspallm import FedSpaLLMSettings
from espalier.settings.mistakes import Mistake
from espalier.wire.plan import ModelPlan
from pruning_kernels.comparison_groups import group_size

COLUMNS_PER_BLOCK = 128
"""Of SparseGPT's lazy updates, within which a pattern must end."""


def require_pattern_fits(plan: ModelPlan, table: str, job: FedPrLLMSettings | FedSpaLLMSettings) -> None:
    """Refuse a pattern that does not divide the rows of a matrix, or the columns that SparseGPT decides at a time.

    Raises
    ------
    Mistake
        It names ``table``'s pattern and the matrix.
    """
    for linear in (linear for block in plan.blocks for linear in block.linears):
        try:
            size = group_size(linear.shape, job.server_group)
        except ValueError as error:
            raise Mistake(f"{table}.pattern = '{job.pattern}': {linear.parameter}: {error}") from None
        in_blocks = isinstance(job, FedSpaLLMSettings) and job.local_method == "sparsegpt"
        if job.pattern and in_blocks and COLUMNS_PER_BLOCK % size:
            raise Mistake(
                f"{table}.pattern = '{job.pattern}': sparsegpt decides {COLUMNS_PER_BLOCK} columns at a time, "
                f"which {size} does not divide; choose another pattern or local-method"
            )
