"""Settings of a run: everything that ``[tool.flwr.app.config]`` holds, validated at once."""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from espalier.settings.fedpetuning import AdapterAveraging, FedPETuningSettings
from espalier.settings.fedprllm import FedPrLLMSettings
from espalier.settings.fedspallm import FedSpaLLMSettings
from espalier.settings.hetlora import HetLoRASettings
from espalier.settings.lora import LoraSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.table import Table, mistake_lines
from espalier.settings.task import TEXT, TaskSettings
from espalier.settings.training import TrainingSettings
from espalier.settings.unread import not_read, one_of

METHODS: dict[str, tuple[str, ...]] = {
    "fedpetuning": ("fedpetuning", "lora", "task", "training"),
    "fedprllm": ("fedprllm",),
    "fedspallm": ("fedspallm",),
    "hetlora": ("hetlora", "lora", "task", "training"),
}
"""The tables of each method, its own and those that it shares with others; the rest is not validated."""

BUILT_IN_TEXTS = ("documentation", "code")
"""Texts that need no file, because every Python installation has them."""

OWN_TEXT = "own-text"
"""Name of the clients' own held-out texts among the texts that models are evaluated on."""

MOST_TEXTS = 16
"""Each of which is a question to every client's own result."""

SIMULATED_QUORUM = 0.5

NOT_PART_OF_THE_RESULT = ("out-dir", "resume-from", "deadline-seconds", "enrol-seconds", "attempts", "activations", "quorum")
"""Settings that may differ between a run and its resumption; a run's ``settings.toml`` has the quorum that 0 stands for."""


class DataSettings(Table):
    """Table ``[data]``: each client's private text, where the node's own configuration names none."""

    source: Literal["documentation", "code", "text", "jsonl", "hub"] = Field(
        "documentation", description="where a client's text comes from"
    )
    path: str = Field("", description="file or directory; {client} stands for the client's number, else it is dealt out")
    field: str = Field("text", min_length=1, description="field of a record that holds the text")
    hub_config: str = Field("", description="configuration of a Hugging Face dataset")
    hub_split: str = Field("", description="split of a Hugging Face dataset; empty: train, or the task's own training split")
    partition: Literal["iid", "by-file", "by-field", "dirichlet", "quantity"] = Field(
        "iid", description="how one file is dealt out to the clients; by-file: each gets a file of the directory"
    )
    partition_field: str = Field("", description="field of a record that labels it, for by-field and dirichlet")
    alpha: float = Field(0.5, gt=0, description="evenness of dirichlet and quantity shares; small values are uneven")
    windows: int = Field(8, ge=1, description="calibration windows per client")
    window_tokens: int = Field(256, ge=2, description="tokens per calibration window")


class EvaluationSettings(Table):
    """Table ``[evaluation]``: the public text on which models are compared."""

    texts: str = Field("documentation", description="comma-separated names; 'name=path' reads a text file")
    window_tokens: int = Field(256, ge=2, description="tokens per evaluation window")
    max_windows: int = Field(48, ge=0, description="windows per text; 0 takes all")
    local_only: bool = Field(True, description="clients evaluate their own local result on the public text")
    own_text: bool = Field(False, description="clients evaluate dense, own and federated model on their own held-out text")
    centralized: Literal["auto", "on", "off"] = Field("auto", description="pooled-data baseline; auto: in simulation only")

    @field_validator("texts")
    @classmethod
    def _texts_are_named(cls, value: str) -> str:
        names = [part.split("=", 1)[0].strip() for part in value.split(",")]
        for part, name in zip(value.split(","), names, strict=True):
            if not name or ("=" not in part and name not in BUILT_IN_TEXTS):
                raise ValueError(f"{part.strip()!r} is neither 'documentation' nor 'code' nor 'name=path'")
        if OWN_TEXT in names:
            raise ValueError(f"{OWN_TEXT!r} is the name of the clients' own text; choose another")
        if len(set(names)) != len(names):
            raise ValueError("two texts have the same name")
        if len(names) > MOST_TEXTS:
            raise ValueError(f"{len(names)} texts, at most {MOST_TEXTS} are evaluated on")
        return value

    def named_texts(self) -> dict[str, str]:
        """Text names and their file paths; the path is empty for built-in texts."""
        parts = [part.strip() for part in self.texts.split(",")]
        return {name.strip(): path.strip() for name, _, path in (part.partition("=") for part in parts)}


class RunSettings(Table):
    """All settings of one run."""

    method: str = Field("fedprllm", description="what the run does")
    model: str = Field("demo", min_length=1, description="'demo' or the directory of a Hugging Face model")
    seed: int = Field(0, ge=0, description="every random choice is derived from it")
    num_clients: int = Field(8, ge=1, description="clients that take part")
    quorum: float = Field(
        0.0, ge=0, le=1, description="share of the clients that must finish a round; 0: half of them in simulation, else all"
    )
    threads: int = Field(2, ge=1, le=1024, description="CPU threads of every process; part of the result's bits")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where tensors are computed")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the forward pass")
    activations: Literal["memory", "disk"] = Field("memory", description="where hidden states are kept between two blocks")
    out_dir: str = Field("runs", min_length=1, description="where run directories are made")
    resume_from: str = Field("", description="run directory to continue")
    part_bytes: int = Field(256 * 1024 * 1024, ge=1024, le=1024**3, description="largest payload of one message, bytes")
    enrol_seconds: float = Field(120.0, gt=0, description="how long to wait for another client to connect")
    deadline_seconds: float = Field(900.0, gt=0, description="how long one message may take before it is sent again")
    attempts: int = Field(2, ge=1, description="how often one message is sent")
    export_check: Literal["transformers", "streamed"] = Field(
        "transformers", description="how the exported model is reloaded for its self-check"
    )
    data: DataSettings = DataSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    lora: LoraSettings = LoraSettings()
    training: TrainingSettings = TrainingSettings()
    task: TaskSettings = TaskSettings()
    fedpetuning: FedPETuningSettings = FedPETuningSettings()
    fedprllm: FedPrLLMSettings = FedPrLLMSettings()
    fedspallm: FedSpaLLMSettings = FedSpaLLMSettings()
    hetlora: HetLoRASettings = HetLoRASettings()

    @property
    def job(self) -> Any:
        """The chosen method's table."""
        return getattr(self, self.method)

    def with_quorum(self, *, simulation: bool) -> "RunSettings":
        """These settings with a quorum: where they name none, half of the clients in simulation, else all of them."""
        return self if self.quorum else self.model_copy(update={"quorum": SIMULATED_QUORUM if simulation else 1.0})

    def nested(self) -> dict[str, Any]:
        """Plain values under hyphenated keys, without the tables that the chosen method does not have."""
        return {key: value for key, value in self.model_dump(by_alias=True).items() if concerns(key, self.method)}

    def digest(self) -> str:
        """SHA-256 of all settings that the result depends on."""
        values = {key: value for key, value in self.nested().items() if key not in NOT_PART_OF_THE_RESULT}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parse(flat: Mapping[str, Any], *, simulation: bool = False, by_hand: Collection[str] = ()) -> RunSettings:
    """Read the run configuration that Flower hands out (flat, dotted keys).

    In ``simulation`` nodes have no data of their own, so that ``[data]`` must say where all of it comes from. Keys that were
    given ``by_hand`` must be read: by the method, and with what is chosen beside them. All other keys that nobody reads are
    passed over.

    Raises
    ------
    Mistake
        With one line per wrong key, type, value or combination, all of them at once.
    """
    nested: dict[str, Any] = {}
    tables = {key.partition(".")[0] for key in flat if "." in key}
    for key, value in flat.items():
        table, dot, name = key.partition(".")
        if dot:
            nested.setdefault(table, {})[name] = value
        elif key not in tables:
            nested[key] = value
    method = nested.get("method", "fedprllm")
    mistakes = [f"{key} = {flat[key]!r}: is a table, set its keys" for key in sorted(tables & flat.keys())]
    if isinstance(method, str) and method not in METHODS:
        mistakes.append(f"method = {method!r}: choose one of {', '.join(sorted(METHODS))}")
    elif isinstance(method, str):
        mistakes += _unread_by_hand(flat, method, by_hand)
    chosen = {key: value for key, value in nested.items() if concerns(key, method)}
    try:
        settings = RunSettings.model_validate(chosen)
    except ValidationError as error:
        mistakes += mistake_lines(error, RunSettings)
    mistakes += _wrong_combinations(nested, simulation)
    mistakes += _contradictions(nested)
    if mistakes:
        raise Mistake("the run's settings are wrong:\n" + "\n".join(f"  {line}" for line in mistakes))
    return settings


def _contradictions(nested: Mapping[str, Any]) -> list[str]:
    """What does not fit within a table that averages adapters, or with adapters and clients; unless one is wrong anyway."""
    method = nested.get("method")
    if not isinstance(method, str) or method not in METHODS:
        return []
    table = RunSettings.model_fields[method].annotation
    if not (isinstance(table, type) and issubclass(table, AdapterAveraging)):
        return []
    num_clients = nested.get("num-clients", RunSettings.model_fields["num_clients"].default)
    if not isinstance(num_clients, int) or num_clients < 1:
        return []
    try:
        job = table.model_validate(nested.get(method, {}))
        return job.contradictions(method, LoraSettings.model_validate(nested.get("lora", {})), num_clients)
    except ValidationError:
        return []


def concerns(key: str, method: Any) -> bool:
    """Whether a method reads a table, or a key of one; what is in no method's table concerns all of them."""
    own, table = METHODS.get(method, ()) if isinstance(method, str) else (), key.partition(".")[0]
    return table in own or not any(table in tables for tables in METHODS.values())


def changed(flat: Mapping[str, Any]) -> set[str]:
    """Keys whose values are not the defaults, unknown keys among them."""
    known = default_values()
    return {key for key, value in flat.items() if key not in known or known[key] != value}


def default_values() -> dict[str, Any]:
    """All keys, dotted, and their defaults."""
    known: dict[str, Any] = {}
    for key, value in RunSettings().model_dump(by_alias=True).items():
        known |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return known


def unread(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Keys of tables that the method has which it does not read all the same; see ``not_read``."""
    tuning = tuple(method for method, tables in METHODS.items() if "training" in tables)
    pruning = tuple(method for method in METHODS if method not in tuning)
    values = default_values() | dict(flat)
    return not_read(values, tuning, pruning) | _not_read_in_tables(values)


def _not_read_in_tables(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The same of the tables that the method has, as they say it of themselves (``Table.READ_WITH``)."""
    found: dict[str, tuple[str, str]] = {}
    for table in METHODS.get(str(flat["method"]), ()):
        kind: Any = RunSettings.model_fields[table].annotation
        for key, conditions in kind.READ_WITH.items():
            for choice, values in conditions.items():
                if flat[f"{table}.{choice}"] not in values:
                    found.setdefault(f"{table}.{key}", (f"{table}.{choice}", one_of(f"{table}.{choice}", values)))
    return found


def _unread_by_hand(flat: Mapping[str, Any], method: str, by_hand: Collection[str]) -> list[str]:
    """A line per key that somebody gave by hand and that is not read."""
    found, values, lines = unread(flat), default_values() | dict(flat), []
    for key in sorted(by_hand):
        if not concerns(key, method):
            lines.append(_unread(key, flat[key], method))
        elif key in found:
            choice, remedy = found[key]
            why = f"{choice} = {values[choice]!r} does not read it"
            lines.append(f"{key} = {flat[key]!r}: {why}; leave it out, or choose {remedy}")
    return lines


def _unread(key: str, value: Any, method: str) -> str:
    """The line on a key that somebody gave by hand to a method that does not read it."""
    table, _, name = key.partition(".")
    readers = [other for other in sorted(METHODS) if table in METHODS[other]]
    namesakes = [f"{own}.{name}" for own in METHODS[method] if _has(own, name)]
    remedies = [f"set {' or '.join(namesakes)}"] if namesakes else ["leave it out"]
    remedies.append(f"choose method = {' or '.join(map(repr, readers))}")
    return f"{key} = {value!r}: method = {method!r} does not read it; {', or '.join(remedies)}"


def _has(table: str, name: str) -> bool:
    kind = RunSettings.model_fields[table].annotation if table in RunSettings.model_fields else None
    fields = kind.model_fields.values() if isinstance(kind, type) and issubclass(kind, Table) else ()
    return any(field.alias == name for field in fields)


def _wrong_combinations(nested: Mapping[str, Any], simulation: bool) -> list[str]:
    """Keys that do not fit each other; looked for also when single values are wrong, so that all is told at once."""
    data = nested.get("data", {})
    if not isinstance(data, Mapping):
        return []
    source, path = data.get("source", "documentation"), data.get("path", "")
    partition, field = data.get("partition", "iid"), data.get("partition-field", "")
    task = nested.get("task", {})
    tuned = "task" in METHODS.get(str(nested.get("method")), ())
    name = task.get("name", TEXT) if tuned and isinstance(task, Mapping) else TEXT
    lines = []
    if isinstance(path, str) and "{rank}" in path:
        lines.append(f"data.path = '{path}': a client's number is written {{client}}; a rank is that of an adapter")
    if partition in ("by-field", "dirichlet") and name == TEXT and (source not in ("jsonl", "hub") or not field):
        lines.append(f"data.partition = '{partition}': needs data.source = 'jsonl' or 'hub' and data.partition-field")
    if name != TEXT and source not in ("jsonl", "hub", *(() if simulation else ("documentation",))):
        lines.append(f"task.name = '{name}': needs data.source = 'jsonl' or 'hub', not '{source}'")
    if partition != "iid" and source in BUILT_IN_TEXTS:
        lines.append(f"data.partition = '{partition}': '{source}' has one source per client; set data.source")
    if partition == "by-file" and source == "hub":
        lines.append("data.partition = 'by-file': a Hugging Face dataset has no files to hand out; choose another partition")
    if simulation and source in ("text", "jsonl", "hub") and not path and not (source == "hub" and name != TEXT):
        lines.append(f"data.path = '': data.source = '{source}' needs the path of a file or the name of a dataset")
    test_path = task.get("test-path") if name != TEXT else None
    if _is_a_clients(test_path, path, nested.get("num-clients", RunSettings.model_fields["num_clients"].default)):
        lines.append(f"task.test-path = '{test_path}': clients train on these items (data.path); name a file of others")
    if source in BUILT_IN_TEXTS and path:
        lines.append(f"data.path = '{path}': set data.source to 'text', 'jsonl' or 'hub', or leave the path empty")
    return lines


def _is_a_clients(test_path: Any, path: Any, num_clients: Any) -> bool:
    """Whether a path is that of the clients' file, or with ``{client}`` that of one client's; False for what is no path."""
    if not (isinstance(test_path, str) and isinstance(path, str) and test_path and path):
        return False
    tested, trained = _resolved(test_path), _resolved(path)
    before, *others = trained.split("{client}")
    if not others:
        return tested == trained
    again = "(?P=client)".join(map(re.escape, others))
    match = re.fullmatch(rf"{re.escape(before)}(?P<client>0|[1-9][0-9]{{0,9}}){again}", tested)
    return match is not None and isinstance(num_clients, int) and int(match["client"]) < num_clients


def _resolved(path: str) -> str:
    try:
        return os.path.abspath(os.path.expanduser(path))
    except (OSError, ValueError):  # the working directory is gone, or no file can have such a name
        return path
