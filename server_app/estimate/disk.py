"""Estimated maximum disk space: client state, run directory, and messages at the SuperLink."""

from collections.abc import Mapping
from dataclasses import dataclass

from espalier.hf.nf4.matrices import nf4_bytes
from espalier.hf.opening.opened import OpenedModel
from espalier.methods.fedprllm.settings import FedPrLLMSettings
from espalier.methods.fedsoda.settings import FedSodaSettings
from espalier.methods.llm_streamline.settings import LlmStreamlineSettings
from espalier.settings.pruning import PruningSettings
from espalier.settings.run import RunSettings
from espalier.settings.structured import PersonalModelSettings
from server_app.estimate.flower_processes import superlink_disk
from server_app.estimate.sizes import Sizes
from server_app.estimate.sub_model import sub_model
from server_app.estimate.traffic import RunTraffic

KEPT_ROUNDS = 2
"""Number of rounds whose replies a client keeps."""
LEDGER_LINE = 260
"""Bytes per line of ``ledger.jsonl``, with one line per message and one per blob in it."""
OWN_MODEL = "its own model"
"""Name of the model in ``models-dir``; all other files are in ``state-dir``."""
SMALL_FILES = 60_000
"""Bytes of the summary, settings, checkpoint documents, and model card."""


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, by kind of content."""

    client: Mapping[str, int]
    server: Mapping[str, int]
    superlink: int


def disk_of(
    settings: RunSettings,
    model: OpenedModel,
    traffic: RunTraffic,
    parameters: int,
    *,
    simulation: bool,
) -> Disk:
    """Return the disk space of a run.

    A client's quantized base is kept for later runs. ``parameters`` is the number of parameters of
    the resulting model.
    """
    job = settings.job
    own = (
        parameters * Sizes(settings, model).stored
        if isinstance(job, PersonalModelSettings) and job.keep_models
        else 0
    )
    at_client = {} if simulation or not own else {OWN_MODEL: own}
    at_server = {"clients/": own * settings.num_clients} if simulation and own else {}
    return Disk(
        _client(settings, model, traffic) | at_client,
        _server(settings, model, traffic, parameters) | at_server,
        superlink_disk(traffic.total().largest, settings.num_clients),
    )


def _client(
    settings: RunSettings, model: OpenedModel, traffic: RunTraffic, client: int = 0
) -> dict[str, int]:
    rounds: dict[int, list[int]] = {}
    for one in traffic.exchanges(client):
        if one.kind in ("train", "fetch", "deliver"):
            rounds.setdefault(one.server_round, []).append(one.up + one.down)
    largest = sorted((sum(sizes) for sizes in rounds.values()), reverse=True)[:KEPT_ROUNDS]
    found = {"answers and deliveries": sum(largest)}
    sizes = Sizes(settings, model)
    job = settings.job
    hidden = settings.data.windows * settings.data.window_tokens * sizes.width * sizes.computed
    if isinstance(job, FedPrLLMSettings) and job.strategy == "iterative":
        found["hidden states"] = KEPT_ROUNDS * hidden
    if settings.activations == "disk" and not settings.tunes:
        found["hidden states in a file without a name"] = 2 * hidden
    if isinstance(job, LlmStreamlineSettings) and job.replacement == "layer":
        found["hidden states"] = 2 * hidden
    if isinstance(job, FedSodaSettings):
        size = sub_model(settings, model).num_bytes
        found["the sub-model, and a piece of it"] = size + min(settings.part_bytes, size)
    if settings.tunes and settings.training.base == "nf4" and job.NEEDS_BASE_MODEL:
        shapes = [linear.shape for block in model.plan.blocks for linear in block.linears]
        found["the quantised base"] = nf4_bytes(shapes)
    return found


def _server(
    settings: RunSettings, model: OpenedModel, traffic: RunTraffic, parameters: int
) -> dict[str, int]:
    sizes = Sizes(settings, model)
    clients = range(settings.num_clients)
    exchanges = [one for client in clients for one in traffic.exchanges(client)]
    by_round: dict[int, int] = {}
    for one in exchanges:
        if one.kind in ("train", "fetch"):
            by_round[one.server_round] = by_round.get(one.server_round, 0) + one.up
    inbox = max(by_round.values(), default=0)
    results = max(
        (
            sum(one.up for one in traffic.exchanges(client) if one.kind in ("train", "fetch"))
            for client in clients
        ),
        default=0,
    )
    whole = parameters * sizes.stored
    writes_model = not settings.tunes or settings.lora.merge
    # The first adapters are stored too, and the last ones are written for peft.
    if settings.tunes:
        results += 2 * results // max(1, len(by_round))
    found = {
        "replies of a round": inbox,
        "checkpoint": results,
        "ledger": 3 * LEDGER_LINE * len(exchanges),
        "small files": SMALL_FILES,
    }
    if writes_model:
        found["model/"] = whole
    if isinstance(settings.job, PruningSettings):
        found["masks"] = model.plan.num_weights // 8
    if isinstance(settings.job, FedSodaSettings):
        found["sub-model/"] = sub_model(settings, model).num_bytes
    return found
