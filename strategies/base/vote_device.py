"""Check before a run starts that its device can count votes."""

import numpy as np
import torch

from espalier.errors import InputError
from pruning_kernels.votes.votes import VoteCounter

WEIGHTS = 64
VOTERS = 9


def require_counting(device: torch.device, asked: str) -> None:
    """Check with a small example that votes can be counted on ``device``.

    The CPU needs no check. On a CUDA device, Triton must compile a kernel first. The check runs
    before clients have spent time on the run.

    Parameters
    ----------
    device : device on which the run counts votes
    asked : value of the setting ``device``, for the error message

    Raises
    ------
    InputError
        Votes cannot be counted there: Triton is missing, finds no C compiler or does not support
        the GPU, or the counts are wrong.
    """
    if device.type == "cpu":
        return
    try:
        counter = VoteCounter((1, WEIGHTS), VOTERS, device)
        counter.count(np.full((VOTERS, 1), np.uint64(1)))
        found = counter.counts()[0].tolist()
    # Triton, the C compiler and the driver raise exceptions of many types.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "" if found == [VOTERS] + [0] * (WEIGHTS - 1) else "it counts the votes wrongly"
    if reason:
        raise InputError(
            f"device = '{asked}': votes cannot be counted on this machine's GPU ({reason}); Triton,"
            " which comes with torch for CUDA, compiles the kernel with a C compiler: install gcc,"
            " or set device to 'cpu'"
        )
