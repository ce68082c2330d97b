"""Adapters of one round at a client: initial values, and the blobs that are kept."""

from collections.abc import Callable, Mapping
from pathlib import Path

from client_app.protocol import client_state
from client_app.protocol.client_state import FEEDBACK
from client_app.site import Site
from espalier.errors import InputError
from espalier.messages.blobs.adapters import differences, pack_adapters, sums, unpack_adapters
from espalier.messages.tensor_blobs import tensor_specs
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.tensors import before_round, blob_specs
from espalier.models.adapters import FACTORS, AdapterPlan, Tensors, cut_to_rank
from espalier.settings.run import RunSettings
from espalier.storage.client_state import PrivateState, private_folder
from espalier.training.initial_values import initial_values
from pruning_kernels.lora.clipping import within_norm


def cache_of(site: Site) -> Path:
    """Return the folder of quantized weights, which are kept between messages."""
    return private_folder(site.node.state_root(), "quantised")


def initial_tensors(site: Site, adapters: AdapterPlan, seed: int) -> Tensors:
    """Return the initial values of a seed; frozen factors (Fed-SB) are kept between messages."""
    root = site.node.state_root()
    factors = private_folder(root, "frozen-factors") if adapters.bases else None
    return initial_values(site.model, adapters, seed, factors)


def begins_with(
    site: Site,
    adapters: AdapterPlan,
    blobs: dict[str, bytes],
    first_values: Callable[[Site], Tensors] | None = None,
    server_round: int = 1,
) -> Tensors:
    """Return the tensors that a round begins with: initial values, or those that the server sent.

    ``first_values`` replaces the initial values that follow from seed and round.
    """
    federation = site.settings.federation
    job = site.settings.of(AdapterAveraging)

    def first() -> Tensors:
        if first_values is not None:
            return first_values(site)
        seed = job.adapter_seed(site.settings.seed, server_round)
        return initial_tensors(site, adapters, seed)

    # In round 1, or with new adapters in each round, nothing was sent.
    if not blobs:
        return first()
    received = before_round(adapters, site.settings, server_round)
    # A wrong number of parts, or adapters of another model, must not be trained.
    _require_all(received, blobs, site.settings)
    # The check of the order decoded its own blobs. Other parts come from the client state.
    decoded = {} if site.request is None else site.request.tensors
    tensors = {
        key: decoded.pop(key, None) or unpack_adapters(shapes, blobs[key], federation.wire_dtype)
        for key, shapes in received.shapes().items()
    }
    differ = job.pushes_differences(federation)
    # Only some factors were sent, or differences: the others have their initial values.
    if not differ and received.factors == FACTORS and not received.bases:
        return tensors
    initial = first()
    return {
        key: {**initial[key], **(sums(initial[key], block) if differ else block)}
        for key, block in tensors.items()
    }


def _require_all(adapters: AdapterPlan, blobs: Mapping[str, bytes], settings: RunSettings) -> None:
    """Raise InputError if a blob is missing, or contains the tensors of another model."""
    specs = blob_specs(adapters, settings)
    prefix = "train: of the adapters that the work begins with"
    if missing := sorted(specs.keys() - blobs.keys()):
        raise InputError(f"{prefix} {', '.join(missing)} were not sent to this client")
    if other := sorted(
        key for key, expected in specs.items() if tensor_specs(blobs[key]) != expected
    ):
        raise InputError(f"{prefix} {', '.join(other)} are those of another model")


def keep_blobs(
    site: Site,
    state: PrivateState,
    server_round: int,
    tensors: Tensors,
    start: Tensors,
    rank: int,
) -> list[str]:
    """Store the blobs of a round, zero beyond ``rank``, and their quantization errors.

    Only factors that the round trains are stored: their values, or their differences from ``start``
    if differences are sent. ``federation.max-update-norm`` limits the change before it is rounded.
    With error feedback, the errors are added to the blobs of the next round that sends them.
    Returns the SHA-256 of each blob.
    """
    federation = site.settings.federation
    store = state.blobs(server_round)
    hashes = []
    job = site.settings.of(AdapterAveraging)
    # Factors that the round does not train are not sent.
    sent = AdapterPlan({}, factors=job.trained_factors(server_round), bases=job.bases)
    feeds_back = job.feeds_back
    # Errors from before this round, so a repeated round adds the same ones.
    owed = client_state.before(state, FEEDBACK, server_round) if feeds_back else {}
    losses = {}
    trained = {
        key: {name: value for name, value in factors.items() if sent.trains(name)}
        for key, factors in tensors.items()
    }
    if federation.max_update_norm:
        trained = within_norm(trained, start, federation.max_update_norm)
    for key, block in trained.items():
        # Differences are taken before rounding; what rounding loses goes into the next round.
        block = differences(block, start[key]) if federation.sends_differences else block
        # The rank may have become lower since the errors were stored.
        residuals = {
            name: loss[tuple(map(slice, block[name].shape))]
            for name, loss in owed.get(key, {}).items()
            if name in block
        }
        # Ranks beyond are zero in both, so no error of a removed rank is sent.
        blob, lost = pack_adapters(
            cut_to_rank(block, rank), federation.wire_dtype, cut_to_rank(residuals, rank)
        )
        hashes.append(store.put(blob))
        if feeds_back and lost:
            # Errors of factors that were not sent wait for a later round.
            losses[key] = {**owed.get(key, {}), **lost}
    if losses:
        client_state.keep(state, FEEDBACK, server_round, losses)
    return hashes
