"""Whether votes can be counted where a run wants them counted, asked before the clients have worked."""

import numpy as np
import torch

from espalier.settings.mistakes import Mistake
from pruning_kernels.votes import VoteCounter

WEIGHTS = 64
VOTERS = 9


def require_counting(device: torch.device, asked: str) -> None:
    """Count a few votes on a device other than the CPU, where a kernel must be compiled first.

    Parameters
    ----------
    device : where the run counts
    asked : what the setting ``device`` says

    Raises
    ------
    Mistake
        It cannot count: Triton is missing, or finds no C compiler, or no GPU that it knows.
    """
    if device.type == "cpu":
        return
    try:
        counter = VoteCounter((1, WEIGHTS), VOTERS, device)
        counter.count(np.full((VOTERS, 1), np.uint64(1)))
        found = counter.counts()[0].tolist()
    except Exception as error:  # of Triton, of a compiler, or of the driver
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = (
            ""
            if found == [VOTERS] + [0] * (WEIGHTS - 1)
            else "the votes that it counts are not those that were given"
        )
    if reason:
        raise Mistake(
            f"device = '{asked}': votes cannot be counted on this machine's GPU ({reason}); Triton,"
            " which comes with torch for CUDA, compiles the kernel with a C compiler: install gcc,"
            " or set device to 'cpu'"
        )
