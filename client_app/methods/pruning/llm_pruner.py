"""LLM-Pruner at a client: importance of each prunable group for the loss on own samples.

With Mask Tuning's rescaling, a second round measures correlations between the outputs of the groups
that remain. Numbers per group and per pair of groups are sent; calibration samples, gradients and
activations never leave.
"""

from typing import Any

from torch import Tensor

from client_app.methods.pruning.pushed_cut import pushed_cut
from client_app.protocol.answer_once import stored_reply
from client_app.protocol.calibration import answer_from_samples, samples_of
from client_app.protocol.evaluation import Evaluation, prepare_evaluation
from client_app.protocol.local_baseline import make_local_baseline, stored_local_baseline
from client_app.site import Site
from espalier.hf.group_scores.mask_tuning import normal_equations, tuned_by_one
from espalier.hf.group_scores.taylor import (
    pack_scores,
    taylor_cut,
    taylor_scores,
    unpack_scores,
)
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.input_statistics import pack_statistics
from espalier.hf.structured.selection import open_cut
from espalier.messages.message import Header, MessageBody
from espalier.methods.pruning.llm_pruner import (
    AIMS,
    JOINT,
    LlmPrunerSettings,
    cut_blocks,
    request_cut,
)
from espalier.models.groups import Groups
from espalier.storage.client_state import PrivateState
from pruning_kernels.groups.slicing import packed

CUT = "cut"
"""Key of the local baseline: hash of each block's blob."""


def train(site: Site, request: MessageBody) -> MessageBody:
    """Score all prunable groups, or measure the remaining ones, and reply with the first part.

    Each round is answered once.
    """
    return _score(site, request) if request.header.server_round == 1 else _measure(site, request)


def _score(site: Site, request: MessageBody) -> MessageBody:
    job = site.settings.of(LlmPrunerSettings)

    def blobs(samples: Tensor) -> list[bytes]:
        num_samples = site.settings.data.num_samples
        scores = taylor_scores(
            site.model, site.computing, samples, job, num_samples, max_rows=num_samples
        )
        return [pack_scores(block_scores) for block_scores in scores.values()]

    return answer_from_samples(site, request, blobs)


def _measure(site: Site, request: MessageBody) -> MessageBody:
    job = site.settings.of(LlmPrunerSettings)
    # The cut is in the request, because it determines which groups are measured.
    cut = request_cut(request, site.model.plan)
    # A request without a valid cut was refused before, when its contract was checked.
    assert cut is not None

    def blobs(samples: Tensor) -> list[bytes]:
        stream = BlockStream(site.model, site.computing)
        equations = normal_equations(stream, samples, cut, job, site.settings.data.num_samples)
        return [pack_statistics({JOINT: packed(joint), AIMS: aims}) for joint, aims in equations]

    return answer_from_samples(site, request, blobs)


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline: cut and rescale with own samples only.

    This is needed after a second round, which concerns the groups that all clients agreed on.
    """

    def make(state: PrivateState) -> dict[str, Any]:
        header = request.header
        job = site.settings.of(LlmPrunerSettings)
        samples = samples_of(site, header)
        num_samples = site.settings.data.num_samples
        made = tuned_by_one(site.model, site.computing, samples, job, num_samples)
        store = state.blobs(header.server_round)
        return {CUT: [store.put(blob) for blob in made]}

    return make_local_baseline(site, request, make)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the local baseline, and all models on the client's own text."""
    header = request.header
    job = site.settings.of(LlmPrunerSettings)
    return prepare_evaluation(
        site, request, _alone(site, header), lambda: pushed_cut(site, header, (), job.rescaled)
    )


def _alone(site: Site, header: Header) -> OpenedModel:
    store = site.state(header).blobs(header.server_round)
    job = site.settings.of(LlmPrunerSettings)
    # After a second round, the cut is made of own samples too.
    if job.has_local_baseline:
        made: list[str] = stored_local_baseline(site, header)[CUT]
        return open_cut(site.model, lambda index: store.get(made[index]), ())
    # Without one, it follows from the scores that were sent.
    kept = stored_reply(site, header, "scores")["report"]["blob_sha256"]
    plan = site.model.plan
    scores = {
        index: unpack_scores(store.get(blob), job, site.settings.data.num_samples)
        for index, blob in zip(cut_blocks(plan, job), kept, strict=True)
    }
    structure = Groups.of(plan).structure(taylor_cut(site.model, scores, job))
    return OpenedModel(site.model.directory, structure)
