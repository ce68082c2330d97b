"""SliceGPT at a client: second moments of the signals at every norm of the dense model.

They are computed on the client's own calibration samples. Moments are sent, unless the run uses
those of a public text; samples and activations never leave. The local baseline is the model sliced
with bases from the client's own moments.
"""

import time
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from client_app.protocol.answer_once import answer_once, stored_reply
from client_app.protocol.calibration import samples_of
from client_app.protocol.evaluation import Evaluation, prepare_evaluation, require_own_text
from client_app.protocol.local_baseline import make_local_baseline, stored_local_baseline
from client_app.protocol.push import pushed_parts
from client_app.site import Site
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced.rotated_checkpoint import SlicedModel
from espalier.hf.sliced.signals import basis_of, mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.input_statistics import pack_statistics, read_statistics
from espalier.messages.message import Header, MessageBody
from espalier.messages.parts import parts_of
from espalier.methods.pruning.slicegpt import (
    BASIS,
    MOMENTS,
    MomentsReport,
    SliceGptSettings,
    basis_specs,
    dense_width,
    moment_specs,
    places,
)
from espalier.storage.blobs import BlobStore
from espalier.storage.client_state import PrivateState
from pruning_kernels.groups.slicing import packed, unpacked

BASES = "bases"
"""Name of a per-round document: hashes of the bases from the client's own moments."""


def train(site: Site, request: MessageBody) -> MessageBody:
    """Compute the moments and reply with the first part.

    If the run uses a public text, the reply contains no moments. Each round is answered once.
    """
    settings = site.settings

    def watch(state: PrivateState) -> MomentsReport:
        started = time.monotonic()
        header = request.header
        # Own text is checked even if no moments are sent.
        require_own_text(site, header)
        # With a public text the reply has no moments.
        if not moment_specs(site.model.plan, settings):
            return MomentsReport(seconds=time.monotonic() - started, blob_sha256=[], samples=0)
        samples = samples_of(site, header)
        store = state.blobs(header.server_round)
        stream = BlockStream(site.model, site.computing)
        hashes = [
            store.put(pack_statistics({MOMENTS: packed(moments)}))
            # One place at a time; a moment matrix is stored before the next is computed.
            for moments in mean_moments(stream, samples)
        ]
        num_samples = len(samples) if settings.federation.client_weights == "samples" else 0
        return MomentsReport(
            seconds=time.monotonic() - started, blob_sha256=hashes, samples=num_samples
        )

    return answer_once(site, request, watch)


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline: bases from own samples, if the round did not request moments."""

    def make(state: PrivateState) -> dict[str, Any]:
        header = request.header
        moments = mean_moments(BlockStream(site.model, site.computing), samples_of(site, header))
        return {BASES: _kept_bases(site, state.blobs(header.server_round), moments)}

    return make_local_baseline(site, request, make)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the local baseline, and all models on the client's own text."""
    return prepare_evaluation(
        site, request, _alone(site, request.header), lambda: _federated(site, request.header)
    )


def _width(site: Site) -> int:
    return site.settings.of(SliceGptSettings).width(dense_width(site.model.plan))


def _kept_bases(site: Site, store: BlobStore, moments: Iterable[Tensor]) -> list[str]:
    """Store the basis of each place, and return the hashes."""
    return [
        store.put(pack_statistics({BASIS: basis_of(moment, _width(site))[0]})) for moment in moments
    ]


def _sliced(site: Site, store: BlobStore, bases: list[str]) -> OpenedModel:
    def basis(place: int) -> Tensor:
        return read_statistics(store.get(bases[place]))[BASIS]

    return SlicedModel(site.model, basis, _width(site))


def _alone(site: Site, header: Header) -> OpenedModel:
    state = site.state(header)
    store = state.blobs(header.server_round)
    if site.settings.job.has_local_baseline:
        return _sliced(site, store, stored_local_baseline(site, header)[BASES])
    hashes = stored_reply(site, header, "moments")["report"]["blob_sha256"]
    # The bases are stored, because their eigendecompositions take long.
    # Computed at the first evaluation, and reused after.
    document = state.load(header.server_round, BASES)
    if document is None:
        dense = dense_width(site.model.plan)
        moments = (unpacked(read_statistics(store.get(blob))[MOMENTS], dense) for blob in hashes)
        document = {BASES: _kept_bases(site, store, moments)}
        state.save(header.server_round, BASES, document)
    return _sliced(site, store, document[BASES])


def _federated(site: Site, header: Header) -> OpenedModel:
    """Return the federated result that the server pushed after the round."""
    parts = parts_of(basis_specs(site.model.plan, site.settings), site.settings.part_bytes)
    store, hashes, _ = pushed_parts(site, header, len(parts))
    return _sliced(site, store, [hashes[place] for place in places(site.model.plan)])
