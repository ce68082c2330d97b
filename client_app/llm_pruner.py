"""LLM-Pruner at a client: what the loss on its own windows would change without a unit.

A number per unit travels; windows, gradients and activations never do.
"""

import time

from client_app.answered_once import Work, answer_once, kept_report
from client_app.delivered_cut import delivered_cut
from client_app.evaluation import answer, require_own_text
from client_app.site import Site
from espalier.corpora.client_text import client_windows
from espalier.modeling.opened import OpenedModel
from espalier.modeling.structured.opened_cut import open_cut
from espalier.modeling.structured.taylor import pack_scores, taylor_cuts, taylor_scores, unpack_scores
from espalier.settings.llm_pruner import LlmPrunerSettings
from espalier.storage.private import PrivateState
from espalier.wire.llm_pruner import score_specs
from espalier.wire.messages import Header, Letter, validate
from espalier.wire.parts import Report, parts_of


def train(site: Site, request: Letter) -> Letter:
    """Score the units and reply with the first part; a round is answered once."""
    job = site.settings.of(LlmPrunerSettings)
    specs = score_specs(site.model.plan, job)

    def score(state: PrivateState) -> Report:
        started, header = time.monotonic(), request.header
        require_own_text(site, header)
        windows = client_windows(site.settings, site.node, site.model.encode, header.client)
        store, asked = state.blobs(header.server_round), site.settings.data.windows
        scores = taylor_scores(site.model, site.computing, windows, job, asked)
        hashes = [store.put(pack_scores(own)) for own in scores]
        return Report(seconds=time.monotonic() - started, blob_sha256=hashes)

    first_part = parts_of(specs, site.settings.part_bytes)[0]
    return answer_once(site, request, Work(Report, list(specs), first_part, score))


def evaluate(site: Site, request: Letter) -> Letter:
    """Loss of what this client would cut by itself on the public text that was sent along, and of all on its own text."""
    return answer(site, request, _alone(site, request.header), lambda: delivered_cut(site, request.header, ()))


def _alone(site: Site, header: Header) -> OpenedModel:
    kept = validate(Report, kept_report(site, header, "scores")["report"]).blob_sha256
    store = site.state(header).blobs(header.server_round)
    scores = [unpack_scores(store.get(blob)) for blob in kept]
    return open_cut(site.model, list(taylor_cuts(site.model, scores, site.settings.of(LlmPrunerSettings))).__getitem__, ())
