"""LLM-Pruner at a client: importance of each prunable group for the loss on own samples.

With Mask Tuning's rescaling, a second round measures correlations between the outputs of the groups
that remain. Numbers per group and per pair of groups are sent; calibration samples, gradients and
activations never leave.
"""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from client_app.methods.llm_pruner_cut import delivered_cut
from client_app.protocol.answer_once import Work, answer_once, kept_report
from client_app.protocol.evaluation import answer, require_own_text
from client_app.protocol.local_baseline import kept_alone, make_alone
from client_app.site import Site
from espalier.data.client_text import client_windows
from espalier.hf.group_scores.mask_tuning import normal_equations, pack_equations, tuned_by_one
from espalier.hf.group_scores.taylor import (
    pack_scores,
    taylor_cut,
    taylor_scores,
    unpack_scores,
)
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.structured.opened_cut import open_cut
from espalier.messages.contract import BlockSpecs
from espalier.messages.message import Header, Letter, validate
from espalier.messages.parts import Report, parts_of
from espalier.methods.llm_pruner.contract import cut_blocks, score_specs
from espalier.methods.llm_pruner.mask_tuning import equation_specs, told_cut
from espalier.methods.llm_pruner.settings import LlmPrunerSettings
from espalier.models.groups import Groups
from espalier.storage.client_state import PrivateState

CUT = "cut"
"""Key of the local baseline: hash of each block's blob."""


def train(site: Site, request: Letter) -> Letter:
    """Score all prunable groups, or measure the remaining ones, and reply with the first part.

    Each round is answered once.
    """
    return _score(site, request) if request.header.server_round == 1 else _measure(site, request)


def _score(site: Site, request: Letter) -> Letter:
    job = site.settings.of(LlmPrunerSettings)
    specs = score_specs(site.model.plan, site.settings)

    def blobs(windows: Tensor) -> list[bytes]:
        asked = site.settings.data.windows
        scores = taylor_scores(site.model, site.computing, windows, job, asked, most_rows=asked)
        return [pack_scores(own) for own in scores.values()]

    return _answered(site, request, specs, blobs)


def _measure(site: Site, request: Letter) -> Letter:
    job = site.settings.of(LlmPrunerSettings)
    cut = told_cut(request, site.model.plan)
    # A request without a valid cut was refused before, when its contract was checked.
    assert cut is not None

    def blobs(windows: Tensor) -> list[bytes]:
        stream = BlockStream(site.model, site.computing)
        found = normal_equations(stream, windows, cut, job, site.settings.data.windows)
        return [pack_equations(equations) for equations in found]

    return _answered(site, request, equation_specs(site.model.plan, cut, job), blobs)


def _answered(
    site: Site, request: Letter, specs: BlockSpecs, blobs: Callable[[Tensor], list[bytes]]
) -> Letter:
    """Compute the blobs from the client's calibration samples, once per round."""

    def work(state: PrivateState) -> Report:
        started = time.monotonic()
        header = request.header
        require_own_text(site, header)
        store = state.blobs(header.server_round)
        hashes = [store.put(blob) for blob in blobs(_windows(site, header))]
        return Report(seconds=time.monotonic() - started, blob_sha256=hashes)

    return answer_once(
        site, request, Work(Report, list(specs), parts_of(specs, site.settings.part_bytes)[0], work)
    )


def _windows(site: Site, header: Header) -> Tensor:
    return client_windows(site.settings, site.node, site.model.encode, header.client)


def alone(site: Site, request: Letter) -> Letter:
    """Compute the local baseline: cut and rescale with own samples only.

    This is needed after a second round, which concerns the groups that all clients agreed on.
    """

    def make(state: PrivateState) -> dict[str, Any]:
        header = request.header
        job = site.settings.of(LlmPrunerSettings)
        made = tuned_by_one(
            site.model, site.computing, _windows(site, header), job, site.settings.data.windows
        )
        store = state.blobs(header.server_round)
        return {CUT: [store.put(blob) for blob in made]}

    return make_alone(site, request, make)


def evaluate(site: Site, request: Letter) -> Letter:
    """Evaluate the local baseline on evaluation text, and all models on the client's own text."""
    header = request.header
    job = site.settings.of(LlmPrunerSettings)
    return answer(
        site, request, _alone(site, header), lambda: delivered_cut(site, header, (), job.rescaled)
    )


def _alone(site: Site, header: Header) -> OpenedModel:
    store = site.state(header).blobs(header.server_round)
    job = site.settings.of(LlmPrunerSettings)
    if job.makes_alone:
        made: list[str] = kept_alone(site, header)[CUT]
        return open_cut(site.model, lambda index: store.get(made[index]), ())
    kept = validate(Report, kept_report(site, header, "scores")["report"]).blob_sha256
    plan = site.model.plan
    scores = {
        index: unpack_scores(store.get(blob), job, site.settings.data.windows)
        for index, blob in zip(cut_blocks(plan, job), kept, strict=True)
    }
    structure = Groups.of(plan).structure(taylor_cut(site.model, scores, job))
    return OpenedModel(site.model.directory, structure)
