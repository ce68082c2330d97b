"""Toy at a client: the mean embedding of its samples."""

from torch import Tensor

from client_app.protocol.calibration import answer_from_samples, evaluate_edits
from client_app.protocol.evaluation import Evaluation
from client_app.site import Site
from espalier.messages.message import MessageBody
from espalier.messages.tensor_blobs import pack_tensors
from tests.toy_method.contract import EDITS


def train(site: Site, request: MessageBody) -> MessageBody:
    """Reply with the mean of the embeddings of all tokens."""

    def mean(samples: Tensor) -> list[bytes]:
        table = site.model.checkpoint.read("model.embed_tokens.weight").float()
        return [pack_tensors({"mean": table[samples.flatten()].mean(dim=0).numpy()})]

    return answer_from_samples(site, request, mean)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the model edited by the client's own vector, and the result."""
    return evaluate_edits(site, request, EDITS)
