"""Settings that contradict each other, as lines of an error: key, value, reason and remedy."""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from espalier.settings.keys import GENERAL, private_methods
from espalier.settings.registry import METHODS, tables_of
from espalier.settings.tables.data import (
    ANSWERS,
    CLASSIFICATION,
    OWN_TASKS,
    DataSettings,
    prompt_fields,
)
from espalier.settings.tables.evaluation import BUILT_IN_TEXTS
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings
from espalier.settings.tables.privacy import privacy_contradictions
from espalier.settings.tables.task import TEXT, TaskSettings, tasks

if TYPE_CHECKING:
    from espalier.settings.run import RunSettings

MIN_SUM_CLIENTS = 3
MAX_SUM_CLIENTS = 900
"""Numbers of clients with which ``federation.secure-sum`` works.

Of two clients, each would know the other's tensors from the sum. The keys of more than 900 do not
fit into one field of a message.
"""


def contradictions(method: str, valid: Mapping[str, Any], num_clients: int) -> list[str]:
    """Return an error line per conflict within a method's table or with the shared tables."""
    job = valid["job"]
    federation = valid["federation"]
    lora = valid.get("lora", LoraSettings())
    lines: list[str] = job.contradictions(method, federation, lora, num_clients)
    if "aggregation-rule" in job.FEDERATION:
        lines += federation.rule_mistakes(method, job, num_clients)
    if "client-weights" in job.FEDERATION and federation.client_weights not in job.WEIGHTS:
        allowed = " or ".join(map(repr, ("auto", *job.WEIGHTS)))
        lines.append(
            f"federation.client-weights = '{federation.client_weights}': {method} does not have"
            f" these weights; set it to {allowed}"
        )
    lines += _too_few_sampled(federation, num_clients)
    if federation.secure_sum and METHODS[method].summands:
        fault = job.secure_sum_fault(federation) or federation.secure_sum_fault()
        lines += [f"federation.secure-sum = true: {fault}"] if fault else []
    # Tables that are wrong are missing here, and reported already.
    if {*GENERAL, *tables_of(method)} - {method} <= valid.keys():
        lines += privacy_contradictions(method, job, valid, private_methods(), num_clients)
    return lines


def imprecise_sums(settings: "RunSettings") -> list[str]:
    """Return an error line if private sums would depend on which records are computed together."""
    if not settings.privacy.on or settings.tunes or settings.dtype == "float32":
        return []
    return [
        f"dtype = '{settings.dtype}': numbers of a record would change with the records that pass"
        f" together with it; with privacy.epsilon = {settings.privacy.epsilon:g}"
        " set it to 'float32'"
    ]


def no_secure_sum(nested: Mapping[str, Any], method: str | None, num_clients: int) -> list[str]:
    """Return an error line per reason why the clients' tensors cannot be summed secretly."""
    given = nested.get("federation")
    if method is None or not isinstance(given, Mapping) or not given.get("secure-sum"):
        return []
    key = "federation.secure-sum = true"
    row = METHODS[method]
    if not row.summands:
        # Whoever tunes is not helped by a method that prunes.
        alike = {name: other for name, other in METHODS.items() if other.tunes == row.tunes}
        able = ", ".join(name for name, other in alike.items() if other.summands)
        why = row.summands_reason or "needs more than the sum of the clients' tensors"
        return [f"{key}: {method} {why}; leave it out, or choose one of {able}"]
    if not MIN_SUM_CLIENTS <= num_clients <= MAX_SUM_CLIENTS:
        return [
            f"{key}: needs num-clients between {MIN_SUM_CLIENTS} and {MAX_SUM_CLIENTS}, not"
            f" {num_clients}; change num-clients, or leave it out"
        ]
    return []


def _too_few_sampled(federation: FederationSettings, num_clients: int) -> list[str]:
    """Return an error line if the clients of a round are too few for a secure sum."""
    sampled = federation.clients_of_round(num_clients)
    # A run with fewer clients has an error of its own.
    if not federation.secure_sum or num_clients < MIN_SUM_CLIENTS or sampled >= MIN_SUM_CLIENTS:
        return []
    return [
        f"federation.sampled-clients = {federation.sampled_clients:g}: takes {sampled} of"
        f" num-clients = {num_clients} into a round, and a secure sum needs {MIN_SUM_CLIENTS};"
        " raise it, or num-clients"
    ]


def wrong_combinations(
    data: DataSettings, task: TaskSettings, num_clients: int, simulation: bool
) -> list[str]:
    """Return an error line per combination of keys of ``[data]`` and ``[task]`` that do not fit."""
    lines = []
    path = data.path
    source = data.origin
    files = ("files", "hub")
    if "{rank}" in path:
        lines.append(
            f"data.path = '{path}': a client's number is written {{client}}; a rank is that of an"
            " adapter"
        )
    lines += _wrong_partition(data, task)
    if task.name in OWN_TASKS and not data.prompt:
        lines.append(
            f"data.prompt = '': task.name = '{task.name}' needs it, such as '{{question}}\\n'"
        )
    elif task.name in OWN_TASKS and (answer := ANSWERS[task.name]) in prompt_fields(data.prompt):
        lines.append(
            f"data.prompt = {data.prompt!r}: contains the field '{answer}', which the model must"
            " give; leave it out of the prompt"
        )
    if task.name == CLASSIFICATION and not data.labels:
        lines.append("data.labels = '': task.name = 'classification' needs them, comma-separated")
    # Sites of a deployment have records of their own, so the source does not matter there.
    if simulation and task.name != TEXT and source not in files:
        lines.append(
            f"task.name = '{task.name}': needs data.path or data.source = 'hub', not data.source ="
            f" '{source}'"
        )
    has_dataset = task.name != TEXT and tasks()[task.name].hub.name
    needs_path = source == "files" or (source == "hub" and not has_dataset)
    if simulation and needs_path and not path:
        lines.append(
            f"data.path = '': data.source = '{source}' needs the path of a file or the name of a"
            " dataset"
        )
    # Other splits of a saved dataset have its path.
    own = "" if data.hub_split else path
    if task.name != TEXT and _is_a_clients(task.test_path, own, num_clients):
        lines.append(
            f"task.test-path = '{task.test_path}': clients train on these items (data.path); name a"
            " file of others"
        )
    if source in BUILT_IN_TEXTS and path:
        lines.append(
            f"data.path = '{path}': set data.source = 'files' or 'hub', or leave the path empty"
        )
    return lines


def _wrong_partition(data: DataSettings, task: TaskSettings) -> list[str]:
    """Return an error line per reason why the clients cannot divide the data as wanted."""
    lines = []
    if (
        data.partition in ("by-field", "dirichlet")
        and task.name == TEXT
        and not (data.origin in ("files", "hub") and data.partition_field)
    ):
        lines.append(
            f"data.partition = '{data.partition}': needs data.path or data.source = 'hub', and"
            " data.partition-field"
        )
    if data.partition == "by-group" and not data.group:
        lines.append("data.partition = 'by-group': needs data.group, the field that names a group")
    if data.partition in ("by-field", "dirichlet", "by-file") and data.group:
        lines.append(
            f"data.partition = '{data.partition}': would divide the groups of data.group ="
            f" '{data.group}'; choose 'by-group', 'iid' or 'quantity'"
        )
    if data.partitioner and data.group and data.partition_field:
        lines.append(
            f"data.partition-field = '{data.partition_field}': with data.group a partitioner gets"
            " the groups; leave it out"
        )
    if data.partition != "iid" and data.origin in BUILT_IN_TEXTS:
        lines.append(
            f"data.partition = '{data.partition}': '{data.origin}' has one source per client; set"
            " data.source"
        )
    if data.partition == "by-file" and data.origin == "hub":
        lines.append(
            "data.partition = 'by-file': a Hugging Face dataset does not consist of files; choose"
            " another partition"
        )
    return lines


def _is_a_clients(test_path: str, path: str, num_clients: int) -> bool:
    """Return whether a path is a file that clients train on; ``{client}`` stands for a number."""
    if not (test_path and path):
        return False
    tested = _resolved(test_path)
    before, *others = _resolved(path).split("{client}")
    if not others:
        return tested == before
    # Every occurrence of ``{client}`` must have the same number.
    again = "(?P=client)".join(map(re.escape, others))
    match = re.fullmatch(rf"{re.escape(before)}(?P<client>0|[1-9][0-9]{{0,9}}){again}", tested)
    return match is not None and int(match["client"]) < num_clients


def _resolved(path: str) -> str:
    try:
        return os.path.abspath(os.path.expanduser(path))
    except (OSError, ValueError):
        # The working directory does not exist, or no file can have such a name.
        return path
