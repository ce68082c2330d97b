"""Estimated maximum disk space: client state, run directory, and messages at the SuperLink."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from espalier.settings.pruning import PersonalModelSettings
from server_app.estimate.memory import superlink_disk
from server_app.estimate.work.base import KEPT_ROUNDS, Work

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


def disk_of(work: Work, *, simulation: bool) -> Disk:
    """Return the disk space of a run.

    A client's quantized base is kept for later runs.
    """
    settings = work.settings
    model = work.result_parameters() * work.sizes.stored
    client = _client(work)
    server = _server(work, model)
    if isinstance(settings.job, PersonalModelSettings) and settings.job.keep_models:
        if simulation:
            server["clients/"] = model * settings.num_clients
        else:
            client[OWN_MODEL] = model
    largest = work.traffic.total().largest
    return Disk(client, server, superlink_disk(largest, settings.num_clients))


def _client(work: Work) -> dict[str, int]:
    rounds = Counter[int]()
    for one in work.traffic.exchanges(0):
        if one.kind in ("train", "fetch", "deliver"):
            rounds[one.server_round] += one.num_bytes
    answers = sum(size for _, size in rounds.most_common(KEPT_ROUNDS))
    return {"answers and deliveries": answers, **work.client_files()}


def _server(work: Work, model: int) -> dict[str, int]:
    settings = work.settings
    exchanges = [work.traffic.exchanges(client) for client in range(settings.num_clients)]
    replies = [[one for one in own if one.kind in ("train", "fetch")] for own in exchanges]
    by_round = Counter[int]()
    for one in (one for own in replies for one in own):
        by_round[one.server_round] += one.up
    results = max(sum(one.up for one in own) for own in replies)
    # The first adapters are stored too, and the last ones are written for peft.
    if settings.tunes:
        results += 2 * results // max(1, len(by_round))
    found = {
        "replies of a round": max(by_round.values(), default=0),
        "checkpoint": results,
        "ledger": 3 * LEDGER_LINE * sum(map(len, exchanges)),
        "small files": SMALL_FILES,
    }
    if not settings.tunes or settings.lora.merge:
        found["model/"] = model
    return {**found, **work.server_files()}
