"""Counter of votes for the device on which they are counted."""

import torch

from pruning_kernels.votes.votes import CPU, VoteCounter


def vote_counter(
    shape: tuple[int, int], num_voters: int, device: torch.device = CPU
) -> VoteCounter:
    """Return a counter without votes, whose planes are on a device."""
    if device.type == "cpu":
        return VoteCounter(shape, num_voters)
    from pruning_kernels.votes.device_votes import DeviceVotes

    return DeviceVotes(shape, num_voters, device)
