"""Setting of a LoRA rank for each client."""

import re
from typing import Annotated

from pydantic import AfterValidator

from espalier.settings.lora import LoraSettings


def _are_ranks(value: str) -> str:
    if value.strip() and not all(
        re.fullmatch(r"[1-9][0-9]{0,5}", part.strip()) for part in value.split(",")
    ):
        raise ValueError("is not a comma-separated list of ranks from 1 on, for instance 2,4,8")
    return value.strip()


Ranks = Annotated[str, AfterValidator(_are_ranks)]
"""LoRA rank of each client, separated by commas; the last one repeats."""


def largest_rank_faults(method: str, ranks: str, lora: LoraSettings, num_clients: int) -> list[str]:
    """Return an error line if no client has the largest rank, ``lora.rank``.

    The last components of the adapters would stay untrained.
    """
    given = ranks.split(",")
    taken = given[:num_clients]
    largest = max(map(int, taken)) if ranks else lora.rank
    if largest == lora.rank:
        return []
    of_clients = "" if taken == given else f" of the first {num_clients} (num-clients)"
    return [
        f"{method}.ranks = '{ranks}': the largest{of_clients} is {largest}, that of"
        f" lora.rank is {lora.rank}; make them equal"
    ]
