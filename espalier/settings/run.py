"""Settings of a run: all of ``[tool.flwr.app.config]``, validated together."""

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field, SerializeAsAny, ValidationError

from espalier.errors import InputError
from espalier.settings.combinations import (
    contradictions,
    imprecise_sums,
    no_secure_sum,
    wrong_combinations,
)
from espalier.settings.keys import GENERAL, flatten, keys_in_order, tables, unread_by_hand
from espalier.settings.method import MethodSettings
from espalier.settings.registry import METHODS, all_tables, settings_of, tables_of
from espalier.settings.shared_keys import TABLES as SHARED_TABLES
from espalier.settings.shared_keys import shared_keys
from espalier.settings.table import mistake_lines
from espalier.settings.tables.data import CLASSIFICATION, DataSettings, listed_labels
from espalier.settings.tables.evaluation import EvaluationSettings
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings
from espalier.settings.tables.privacy import PrivacySettings
from espalier.settings.tables.task import TEXT, TaskSettings, tasks
from espalier.settings.tables.training import TrainingSettings
from espalier.settings.top_level import DEFAULT_METHOD, TopSettings
from espalier.settings.unknown_key import unknown_key

J = TypeVar("J", bound=MethodSettings)

SIMULATED_QUORUM = 0.5

JOB = "job"
"""Field that holds the chosen method's own table; not a valid key in a file."""

NOT_PART_OF_THE_RESULT = (
    "out-dir", "resume-from", "deadline-seconds", "enrol-seconds", "attempts", "round-seconds",
    "activations", "quorum", "site-keys", "tracking",
)  # fmt: skip
"""Settings that may differ between a run and its resumption.

The ``settings.toml`` of a run holds the quorum that 0 stands for.
"""


def of_the_result(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the result depends on, by dotted key."""
    flat = flatten(nested)
    return {key: value for key, value in flat.items() if key not in NOT_PART_OF_THE_RESULT}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each setting by dotted key that differs, with both values."""
    keys = sorted(key for key in now.keys() | before.keys() if before.get(key) != now.get(key))
    return [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys]


class RunSettings(TopSettings):
    """All settings of one run."""

    data: DataSettings = DataSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    privacy: PrivacySettings = PrivacySettings()
    federation: FederationSettings = FederationSettings()
    lora: LoraSettings = LoraSettings()
    training: TrainingSettings = TrainingSettings()
    task: TaskSettings = TaskSettings()
    job: SerializeAsAny[MethodSettings] = Field(
        default_factory=lambda: settings_of(DEFAULT_METHOD)()
    )
    """Own table of the chosen method; in files it has the method's name."""

    @property
    def tunes(self) -> bool:
        """True if clients train in this run, on a task or on text.

        Clients of other methods read calibration samples.
        """
        return METHODS[self.method].tunes

    @property
    def training_tokens(self) -> int:
        """Maximum number of tokens of a training sequence."""
        return self.data.sequence_length if self.task.name == TEXT else self.task.max_tokens

    @property
    def tokens_of_round(self) -> int:
        """Number of tokens on which a client trains in a round, if all sequences are full."""
        training = self.training
        steps = training.steps * training.accumulation
        return steps * training.batch_size * self.training_tokens

    @property
    def num_classes(self) -> int:
        """Number of classes for an encoder; 0 if encoders cannot do the task."""
        if self.task.name == TEXT:
            return 0
        if self.task.name == CLASSIFICATION:
            return len(listed_labels(self.data.labels))
        return len(tasks()[self.task.name].classes)

    def makes_centralized(self, *, simulation: bool) -> bool:
        """Return whether the server makes the centralized baseline."""
        return simulation and self.evaluation.centralized == "auto"

    def of(self, kind: type[J]) -> J:
        """Return the chosen method's own table, typed as ``kind``.

        Raises TypeError if the table is of another kind.
        """
        if not isinstance(self.job, kind):
            raise TypeError(f"method {self.method} has no {kind.__name__}")
        return self.job

    def without_proximal(self) -> "RunSettings":
        """Return these settings without FedProx, for a method with a proximal term of its own."""
        return self.model_copy(
            update={"training": self.training.model_copy(update={"proximal": 0.0})}
        )

    def with_quorum(self, *, simulation: bool) -> "RunSettings":
        """Return these settings with the default quorum if they do not set one.

        The default is half of the clients in a simulation and all of them in a deployment.
        """
        return (
            self
            if self.quorum
            else self.model_copy(update={"quorum": SIMULATED_QUORUM if simulation else 1.0})
        )

    def nested(self) -> dict[str, Any]:
        """Return plain values under hyphenated keys, without tables of other methods."""
        others = all_tables() - set(tables_of(self.method))
        values = {
            key: value for key, value in self.model_dump(by_alias=True).items() if key not in others
        }
        job = values.pop(JOB)
        for key, table in shared_keys(type(self.job)).items():
            values[table] = values.get(table, {}) | {key: job.pop(key)}
        return {**values, self.method: job}

    def digest(self) -> str:
        """Return the SHA-256 hash of all settings that affect the result."""
        values = {
            key: value for key, value in self.nested().items() if key not in NOT_PART_OF_THE_RESULT
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parse(
    flat: Mapping[str, Any], *, simulation: bool = False, by_hand: Collection[str] = ()
) -> RunSettings:
    """Parse the flat run configuration with dotted keys that Flower provides.

    Parameters
    ----------
    simulation : nodes have no data of their own, so that ``[data]`` must name the source of all
        data
    by_hand : keys that the user gave explicitly; the run must read each of them, while other keys
        that are not read are ignored

    Raises
    ------
    InputError
        The message has one line for every wrong key, type, value or combination.
    """
    nested, mistakes = _nested(flat)
    method, more = _method_of(nested)
    mistakes += more
    not_read = unread_by_hand(flat, method, by_hand) if method else []
    valid, more = _validated_tables(nested, method)
    mistakes += more
    settings = None
    others = {*all_tables(), *GENERAL}
    top = {key: value for key, value in nested.items() if key not in others}
    # Their keys are fields of the method's own table.
    kept = {name: table for name, table in valid.items() if name not in SHARED_TABLES}
    try:
        settings = RunSettings.model_validate(top | kept | {"method": method or DEFAULT_METHOD})
    except ValidationError as error:
        mistakes += mistake_lines(error, keys_in_order(method))
    if settings is not None and "privacy" in valid:
        mistakes += imprecise_sums(settings)
    num_clients = top.get("num-clients", RunSettings.model_fields["num_clients"].default)
    num_clients = num_clients if isinstance(num_clients, int) else 0
    if method and JOB in valid and num_clients > 0:
        mistakes += contradictions(method, valid, num_clients)
    mistakes += no_secure_sum(nested, method, num_clients)
    if simulation and (keys := nested.get("site-keys")):
        mistakes.append(f"site-keys = {keys!r}: simulated clients have no keys; leave it out")
    if "data" in valid and ("task" in valid or "task" not in tables_of(method or "")):
        task = valid.get("task", TaskSettings())
        mistakes += wrong_combinations(valid["data"], task, num_clients, simulation)
    # Where another line says why a method has no use for a key, that is enough.
    known = {line.partition(" = ")[0] for line in mistakes}
    mistakes = [line for line in not_read if line.partition(" = ")[0] not in known] + mistakes
    if settings is None or mistakes:
        raise InputError(
            "the run's settings are wrong:\n" + "\n".join(f"  {line}" for line in mistakes)
        )
    return settings


def _nested(flat: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by table and key, and an error line per key in the place of a table."""
    nested: dict[str, Any] = {}
    tables = {key.partition(".")[0] for key in flat if "." in key}
    for key, value in flat.items():
        table, dot, name = key.partition(".")
        if dot:
            nested.setdefault(table, {})[name] = value
        elif key not in tables:
            nested[key] = value
    mistakes = [
        f"{key} = {flat[key]!r}: is a table, set its keys" for key in sorted(tables & flat.keys())
    ]
    if nested.pop(JOB, None) is not None:
        mistakes.append(f"{JOB}: unknown key; a method's table has its name")
    known = keys_in_order(nested.get("method", DEFAULT_METHOD))
    for table in sorted(tables & nested.keys() - {*all_tables(), *GENERAL}):
        mistakes += [unknown_key(f"{table}.{key}", known) for key in nested.pop(table)]
    return nested, mistakes


def _method_of(nested: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return the chosen method, or None and an error line if there is no such method.

    A wrong method becomes None in ``nested``, so that it is reported once.
    """
    method = nested.get("method", DEFAULT_METHOD)
    if isinstance(method, str) and method in METHODS:
        return method, []
    nested["method"] = None
    close = difflib.get_close_matches(str(method), METHODS, n=1)
    meant = f"did you mean '{close[0]}'? " if close else ""
    return None, [f"method = {method!r}: {meant}choose one of {', '.join(METHODS)}"]


def _validated_tables(
    nested: Mapping[str, Any], method: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the valid tables that the method reads, and an error line per invalid value.

    The method's own table has the name ``JOB``. If its own table and ``[federation]`` are valid,
    concrete values take the place of 0 rounds and ``paper`` weights.
    """
    valid: dict[str, Any] = {}
    mistakes = list[str]()
    kinds = tables()
    for name in (*GENERAL, *tables_of(method or "")):
        if name == method:
            continue
        try:
            valid[name] = kinds[name].model_validate(nested.get(name, {}))
        except ValidationError as error:
            mistakes += mistake_lines(error, keys_in_order(method), name)
    if method:
        job, more = _own_table(nested, method, reported=mistakes)
        mistakes += more
        valid |= {JOB: job} if job else {}
    if JOB in valid:
        federation = valid.get("federation", FederationSettings())
        valid["federation"] = federation.for_method(valid[JOB])
    return valid, mistakes


def _own_table(
    nested: Mapping[str, Any], method: str, *, reported: Sequence[str]
) -> tuple[MethodSettings | None, list[str]]:
    """Return the method's settings, with its shared keys, or an error line per invalid value.

    Parameters
    ----------
    reported : error lines of the shared tables, whose keys are not reported again
    """
    shared = shared_keys(settings_of(method))
    own = nested.get(method, {})
    keys_of_method = keys_in_order(method)
    lines = []
    if isinstance(own, Mapping):
        lines = [unknown_key(f"{method}.{key}", keys_of_method) for key in own if key in shared]
        written = {name: table for name, table in nested.items() if isinstance(table, Mapping)}
        taken = {
            key: written[table][key]
            for key, table in shared.items()
            if key in written.get(table, {})
        }
        own = {key: value for key, value in own.items() if key not in shared} | taken
    try:
        job = settings_of(method).model_validate(own)
    except ValidationError as error:
        found = mistake_lines(error, keys_of_method, method, shared)
        keys = {line.partition(" ")[0] for line in reported}
        return None, lines + [line for line in found if line.partition(" ")[0] not in keys]
    return (None if lines else job), lines
