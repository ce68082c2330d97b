"""Work of a client of the toy: the mean embedding of its text, and the models it evaluates."""

import time

import torch

from client_app.protocol.answer_once import answer_once, kept_report
from client_app.protocol.evaluation import Evaluation, prepare_evaluation, require_own_text
from client_app.protocol.push import taken
from client_app.site import Site
from espalier.data.client_text import client_windows
from espalier.hf.stream.edits import Edits
from espalier.messages.message import Letter
from espalier.messages.parts import Report
from espalier.messages.payload import pack_tensors
from espalier.storage.client_state import PrivateState
from toy_method.model import scaled
from toy_method.settings import ToySettings


def train(site: Site, request: Letter) -> Letter:
    """Reply with the mean of the embeddings of all tokens, float32, shape (width,)."""

    def mean(state: PrivateState) -> Report:
        started = time.monotonic()
        require_own_text(site, request.header)
        windows = client_windows(site.settings, site.node, site.model.encode, request.header.client)
        table = site.model.checkpoint.read("model.embed_tokens.weight").to(torch.float32)
        blob = pack_tensors({"mean": table[windows.flatten()].mean(dim=0).numpy()})
        return Report(
            seconds=time.monotonic() - started,
            blob_sha256=[state.blobs(request.header.server_round).put(blob)],
        )

    return answer_once(site, request, mean)


def evaluate(site: Site, request: Letter) -> Evaluation:
    """Prepare to evaluate the models; the local baseline is scaled by the client's own vector."""
    header = request.header
    strength = site.settings.of(ToySettings).strength
    (own,) = kept_report(site, header, "vector")["report"]["blob_sha256"]

    def federated() -> Edits:
        store, hashes, _ = taken(site, header, 1)
        return scaled(store.get(hashes["vector"]), strength)

    return prepare_evaluation(
        site,
        request,
        scaled(site.state(header).blobs(header.server_round).get(own), strength),
        federated,
    )
