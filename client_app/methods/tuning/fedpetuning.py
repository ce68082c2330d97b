"""FedPETuning at a client: a round of adapter averaging, by DP-SGD with differential privacy."""

from client_app.methods.private import tuning as private_tuning
from client_app.methods.tuning import adapter_averaging
from client_app.methods.tuning.adapter_averaging import evaluate, local_baseline
from client_app.site import Site
from espalier.messages.message import MessageBody

__all__ = ["evaluate", "local_baseline", "train"]


def train(site: Site, request: MessageBody) -> MessageBody:
    """Train the round's adapters and reply with the first part. Each round is answered once."""
    if site.settings.privacy.on:
        return private_tuning.train(site, request)
    return adapter_averaging.train(site, request)
