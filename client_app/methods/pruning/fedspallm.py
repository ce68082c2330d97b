"""FedSpaLLM at a client (algorithm 1, lines 8 to 14): prune the sampled layers with own text.

Masks and kept weights of the sampled layers are sent; calibration tokens, activations and Gram
matrices never leave. The layers of the global model that the server pushed stay in the client state
until newer versions replace them.
"""

import time
from collections.abc import Callable, Mapping

from client_app.methods.pruning.fedspallm_layers import (
    StoredLayers,
    are_stored,
    store_layers,
    stored_layers,
)
from client_app.protocol.answer_once import answer_once, stored_reply
from client_app.protocol.calibration import samples_of
from client_app.protocol.errors import kernel_errors
from client_app.protocol.evaluation import Evaluation, prepare_evaluation, require_own_text
from client_app.site import Site
from espalier.errors import InputError, StateLost
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import prune_layers
from espalier.hf.stream.edits import Edits, WeightEdit, replaced
from espalier.messages.blobs.mask_tensors import pack_kept, unpack_kept
from espalier.messages.message import MessageBody, validate
from espalier.methods.pruning.fedspallm import (
    FedSpaLLMSettings,
    PruneReport,
    SampledBlocks,
    sparsity_of,
)
from espalier.storage.client_state import PrivateState
from pruning_kernels.selection.local_pruning import LocalPruning


def train(site: Site, request: MessageBody) -> MessageBody:
    """Prune the sampled layers and reply with the first part. Each round is answered once."""
    header = request.header
    sampled = validate(SampledBlocks, request.fields)

    def prune(state: PrivateState) -> PruneReport:
        require_own_text(site, header)
        return _prune(site, state, request, sampled)

    # Layers up to the last sampled one determine the calibration inputs, and so the answer.
    def layers_before(state: PrivateState) -> dict[str, str]:
        stored = stored_layers(state, header.server_round).items()
        last = sampled.blocks[-1]
        # Hashes of the layers before: the same request with other layers is another request.
        return {index: layer["blob"] for index, layer in stored if int(index) <= last}

    def require_layers(state: PrivateState) -> None:
        stored = stored_layers(state, header.server_round)
        # Round 1 starts from the dense model, with versions of 0.
        if not are_stored(state, stored, sampled.versions, range(sampled.blocks[-1] + 1)):
            raise StateLost("this client no longer holds the layers that the server sent")

    return answer_once(site, request, prune, layers_before, require_layers)


def _prune(
    site: Site, state: PrivateState, request: MessageBody, sampled: SampledBlocks
) -> PruneReport:
    """Prune the sampled layers of the global model, and store each as soon as it is pruned."""
    started = time.monotonic()
    server_round = request.header.server_round
    stored = stored_layers(state, server_round)
    # Recorded for this round before the work: a repeated request finds the same layers.
    store_layers(state, server_round, stored)
    samples = samples_of(site, request.header)
    job = site.settings.of(FedSpaLLMSettings)
    store = state.blobs(server_round)
    hashes = []
    damping = 0.0
    sparsity = sparsity_of(site.settings, server_round)
    pruning = LocalPruning(job.local_method, sparsity, job.local_group, job.damping_mean)
    with kernel_errors():
        stream = BlockStream(site.model, site.computing)
        edits = _global(site, state, stored)
        # Inputs pass through the pruned layers of the global model.
        for layer in prune_layers(stream, samples, pruning, sampled.blocks, edits):
            hashes.append(store.put(pack_kept(layer.matrices)))
            damping = max(damping, layer.damping)
    # A number of samples leaves only if it is needed as a weight.
    weighed = site.settings.federation.client_weights == "samples"
    return PruneReport(
        seconds=time.monotonic() - started,
        calibration_samples=len(samples) if weighed else 0,
        damping=damping,
        blob_sha256=hashes,
    )


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the client's own model (equation 9), and all models on own text."""
    header = request.header
    state = site.state(header)
    kept = stored_reply(site, header, "layers")
    sampled = validate(SampledBlocks, kept["order"])
    hashes = dict(zip(sampled.blocks, kept["report"]["blob_sha256"], strict=True))
    stored = stored_layers(state, header.server_round)
    others = [index for index in range(len(site.model.plan.blocks)) if index not in hashes]
    # A client's own model needs the layers of the global model that it did not prune itself.
    if not are_stored(state, stored, sampled.versions, others):
        raise InputError(
            "evaluate: this client does not hold the layers that the server sent; run the round"
            " again"
        )
    before = _global(site, state, stored)
    pruned = _edits(site, lambda index: state.blobs(header.server_round).get(hashes[index]))

    def alone(index: int) -> Mapping[str, WeightEdit]:
        return pruned(index) if index in hashes else before(index)

    # The result of the last round is pushed as if for one more round.
    return prepare_evaluation(
        site,
        request,
        alone,
        lambda: _global(site, state, stored_layers(state, header.server_round + 1)),
    )


def _global(site: Site, state: PrivateState, stored: StoredLayers) -> Edits:
    """Return the edits that turn the base model into the global one, for the layers stored here."""
    edits = _edits(site, lambda index: state.lasting().get(stored[str(index)]["blob"]))
    return lambda index: edits(index) if str(index) in stored else {}


def _edits(site: Site, blob: Callable[[int], bytes]) -> Edits:
    plan = site.model.plan
    return replaced(
        lambda index: {
            name: m.weight() for name, m in unpack_kept(plan.blocks[index], blob(index)).items()
        }
    )
