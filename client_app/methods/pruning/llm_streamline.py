"""LLM-Streamline at a client: similarity of block inputs and outputs, then a replacement layer.

The first round measures how little each stretch of blocks changes the hidden states. Later rounds
train a layer that imitates one stretch. Cosines and the layer are sent; calibration samples and
hidden states never leave. The hidden states around the stretch stay in the client state, so that
later rounds do not pass through the model again.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from client_app.protocol.answer_once import answer_once, stored_reply
from client_app.protocol.calibration import answer_from_samples, samples_of
from client_app.protocol.evaluation import Evaluation, prepare_evaluation
from client_app.protocol.local_baseline import make_local_baseline, stored_local_baseline
from client_app.protocol.push import (
    pushed_blobs,
    pushed_parts,
    result_header,
    start_blobs,
    start_hashes,
)
from client_app.site import Site
from espalier.data.data_protection import require_tokens
from espalier.errors import EspalierError
from espalier.hf.group_scores.streamline import (
    first_layer,
    most_similar_stretch,
    open_streamlined,
    stretch_cosines,
)
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.input_statistics import pack_statistics, read_statistics
from espalier.messages.blobs.adapters import differences, pack_adapters, read_layer
from espalier.messages.message import Header, MessageBody, validate
from espalier.methods.pruning.llm_streamline import (
    COSINES,
    LayerReport,
    LlmStreamlineSettings,
    Replace,
    layer_parts,
)
from espalier.seeds import derive_seed
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState
from espalier.training.loop import Trained
from espalier.training.replacement import Replacement, Stretch

STRETCH = "stretch"
"""Name of the document with the hidden states around a stretch, for later rounds."""


def train(site: Site, request: MessageBody) -> MessageBody:
    """Compare blocks, or train the layer, and reply with the first part, once per round."""

    def cosines(samples: Tensor) -> list[bytes]:
        stream = BlockStream(site.model, site.computing)
        return [pack_statistics({COSINES: _cosines(site, stream, samples)})]

    if request.header.server_round == 1:
        return answer_from_samples(
            site, request, cosines, lambda samples: {"tokens": samples.numel()}
        )
    return answer_once(
        site,
        request,
        lambda state: _train(site, state, request),
        lambda _: start_hashes(site, request),
    )


def _cosines(site: Site, stream: BlockStream, samples: Tensor) -> Tensor:
    job = site.settings.of(LlmStreamlineSettings)
    return stretch_cosines(stream, samples, _span(site), after_norm=job.compares_after_norm)


def _span(site: Site) -> int:
    return site.settings.of(LlmStreamlineSettings).span(len(site.model.plan.blocks))


def _train(site: Site, state: PrivateState, request: MessageBody) -> LayerReport:
    """Train, store the blob of each tensor, and return the report."""
    started = time.monotonic()
    header = request.header
    federation = site.settings.federation
    steps = site.settings.of(LlmStreamlineSettings).steps
    start = validate(Replace, request.fields).start
    first = first_layer(site.model, start)
    blobs = start_blobs(site, request)
    # In round 2 the layer begins as the base model's block.
    initial = read_layer(blobs, first, federation) if blobs else first
    samples = samples_of(site, header)
    stretch = _stretch(site, state, samples, start)
    # Round 1 does not train.
    first_step = (header.server_round - 2) * steps
    tensors, outcome = _trained(site, stretch, initial, first_step, steps, header)
    # Relative to what the client began with, before rounding for the wire.
    sent = differences(tensors, initial) if federation.sends_differences else tensors
    store = state.blobs(header.server_round)
    return LayerReport(
        seconds=time.monotonic() - started,
        blob_sha256=[
            store.put(pack_adapters({name: value}, federation.wire_dtype)[0])
            for name, value in sent.items()
        ],
        samples=len(samples) if federation.client_weights == "samples" else 0,
        skipped_steps=outcome.skipped_steps,
    )


def _trained(
    site: Site,
    stretch: Stretch,
    initial: dict[str, Tensor],
    first_step: int,
    steps: int,
    header: Header,
) -> tuple[dict[str, Tensor], Trained]:
    job = site.settings.of(LlmStreamlineSettings)
    rounds = site.settings.federation.rounds
    seed = derive_seed(site.settings.seed, "training", client=header.client)
    training = Replacement(stretch, job.training, seed, rounds * job.steps)
    remedy = (
        "give the site more data, raise data.num-samples, llm-streamline.steps or"
        " llm-streamline.batch-size"
    )
    length = stretch.samples.shape[1]

    # Checked before the work, so that a site never trains on too little data.
    def require_enough(steps: Sequence[int]) -> None:
        used = training.used(steps)
        require_tokens(site.node, length * len(used), remedy)
        site.require_groups_of(used, remedy)

    require_enough(range(first_step, first_step + steps))
    # The check is repeated after training: skipped steps contribute no tokens.
    tensors, outcome = training.run(initial, first_step, steps)
    require_enough(outcome.weighed)
    return tensors, outcome


def _stretch(site: Site, state: PrivateState, samples: Tensor, start: int) -> Stretch:
    """Return the hidden states around a stretch, from the client state or computed again."""
    stream = BlockStream(site.model, site.computing)
    store = state.lasting()
    # These values determine the hidden states.
    walked = {
        "start": start,
        "samples": sha256(samples.numpy().tobytes()),
        "settings": site.settings.digest(),
    }
    # A missing or damaged document is computed again.
    with suppress(EspalierError):
        kept = state.load_lasting(STRETCH) or {}
        # Only states of the same samples, settings and stretch are used.
        if kept.get("walked") == walked:
            with store.opened(kept["before"]) as before, store.opened(kept["behind"]) as behind:
                states = stream.resume(samples, before), stream.resume(samples, behind)
                return Stretch(stream, samples, start, *states)
    stretch = Stretch.walked(stream, samples, start, _span(site))
    hashes = {
        "before": store.put_pieces(stretch.before.pieces()),
        "behind": store.put_pieces(stretch.behind.pieces()),
    }
    state.save_lasting(STRETCH, {"walked": walked, **hashes})
    # States are large, so only those of the last stretch stay.
    store.keep_only(hashes.values())
    return stretch


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline: blocks by own cosines, and a layer trained without the others.

    The layer is trained for as many steps as in all rounds together.
    """

    def make(state: PrivateState) -> dict[str, Any]:
        header = request.header
        job = site.settings.of(LlmStreamlineSettings)
        samples = samples_of(site, header)
        stream = BlockStream(site.model, site.computing)
        start = most_similar_stretch(_cosines(site, stream, samples))
        stretch = Stretch.walked(stream, samples, start, _span(site))
        # As many steps as the client takes in all rounds.
        steps = site.settings.federation.rounds * job.steps
        tensors, _ = _trained(site, stretch, first_layer(site.model, start), 0, steps, header)
        return {"start": start, "layer": state.blobs(header.server_round).put(save(tensors))}

    return make_local_baseline(site, request, make)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the local baseline, and all models on the client's own text."""
    return prepare_evaluation(
        site, request, _alone(site, request.header), lambda: _federated(site, request.header)
    )


def _alone(site: Site, header: Header) -> OpenedModel:
    store = site.state(header).blobs(header.server_round)
    # If a layer replaces the stretch, the baseline has one too.
    if site.settings.job.has_local_baseline:
        made = stored_local_baseline(site, header)
        return open_streamlined(
            site.model, made["start"], _span(site), load(store.get(made["layer"]))
        )
    (kept,) = stored_reply(site, header, "cosines")["report"]["blob_sha256"]
    cosines = read_statistics(store.get(kept))[COSINES]
    return open_streamlined(site.model, most_similar_stretch(cosines), _span(site), None)


def _federated(site: Site, header: Header) -> OpenedModel:
    """Return the federated result that the server pushed after the last round."""
    # The first part names the stretch, from which the number of parts follows.
    _, _, (order, *_) = pushed_parts(site, result_header(header), 1)
    start = validate(Replace, order).start
    if site.settings.of(LlmStreamlineSettings).replacement == "none":
        return open_streamlined(site.model, start, _span(site), None)
    num_parts = len(layer_parts(site.model.plan, site.settings, start))
    blobs = pushed_blobs(site, result_header(header), num_parts)
    layer = read_layer(blobs, first_layer(site.model, start), site.settings.federation)
    return open_streamlined(site.model, start, _span(site), layer)
