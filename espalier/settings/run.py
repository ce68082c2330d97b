"""Settings of a run: everything that ``[tool.flwr.app.config]`` holds, validated at once."""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args

from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from espalier.settings.federation import FederationSettings
from espalier.settings.lora import LoraSettings
from espalier.settings.method import MethodSettings
from espalier.settings.methods import METHODS, all_tables, settings_of, tables_of
from espalier.settings.mistakes import Mistake
from espalier.settings.personal import PersonalModelSettings
from espalier.settings.table import ReadWith, Table, mistake_lines, unknown_key
from espalier.settings.task import TEXT, TaskSettings
from espalier.settings.training import TrainingSettings
from espalier.settings.unread import not_read, one_of

J = TypeVar("J", bound=MethodSettings)

BUILT_IN_TEXTS = ("documentation", "code")
"""Texts that need no file, because every Python installation has them."""

OWN_TEXT = "own-text"
"""Name of the clients' own held-out texts among the texts that models are evaluated on."""

MOST_TEXTS = 16
"""Each of which is a question to every client's own result."""

SIMULATED_QUORUM = 0.5

DEFAULT_METHOD = "fedprllm"

JOB = "job"
"""Field of the chosen method's own table; no key of a file."""

NOT_PART_OF_THE_RESULT = (
    "out-dir", "resume-from", "deadline-seconds", "enrol-seconds", "attempts", "round-seconds", "activations", "quorum",
    "site-keys",
)  # fmt: skip
"""Settings that may differ between a run and its resumption; a run's ``settings.toml`` has the quorum that 0 stands for."""


class DataSettings(Table):
    """Table ``[data]``: each client's private text, where the node's own configuration names none."""

    source: Literal["documentation", "code", "text", "jsonl", "hub"] = Field(
        "documentation",
        description=(
            "Where a client's text comes from: parts of Python's documentation, source code of"
            " Python's standard library without docstrings (the demo model was not trained on it),"
            " a text file, JSON Lines, or a dataset of the Hugging Face hub (needs the extra"
            " `hub`). A site of a deployment reads what its own configuration names instead."
        ),
    )
    path: str = Field(
        "",
        description=(
            "File or directory, or with `hub` the name of a dataset (empty: the task's own)."
            " `{client}` stands for the client's number; without it one file is dealt out to the"
            " clients."
        ),
    )
    field: str = Field("text", min_length=1, description="Field of a record that holds the text.")
    hub_config: str = Field("", description="Configuration of the Hugging Face dataset.")
    hub_split: str = Field(
        "",
        description=(
            "Split of the Hugging Face dataset; empty: `train` for text, for a task its own"
            " training split."
        ),
    )
    partition: Literal["iid", "by-file", "by-field", "dirichlet", "quantity"] = Field(
        "iid",
        description=(
            "How one file is dealt out to simulated clients: evenly at random, by the value of a"
            " field, unevenly by label (Dirichlet) or in size, or with `by-file` a file of the"
            " directory to each."
        ),
    )
    partition_field: str = Field(
        "",
        description=(
            "Field that labels a record, for `by-field` and `dirichlet` of text; a task has labels"
            " of its own."
        ),
    )
    alpha: float = Field(
        0.5,
        gt=0,
        description=(
            "Evenness of `dirichlet` and `quantity` shares; small values give uneven shares."
        ),
    )
    windows: int = Field(
        8, ge=1, description="Calibration windows per client, of methods that prune."
    )
    window_tokens: int = Field(
        256,
        ge=2,
        description=(
            "Tokens per window of a client's text, at most as many as the model has positions."
        ),
    )


class EvaluationSettings(Table):
    """Table ``[evaluation]``: the public text on which models are compared."""

    READ_WITH: ClassVar[ReadWith] = {"centralized": {"baselines": (True,)}}

    texts: str = Field(
        "documentation",
        description=(
            "Public texts on which models are compared, comma-separated, at most 16:"
            " `documentation` and `code` (a tenth of the passages, which no client holds), or"
            " `name=path`, which reads a text file."
        ),
    )
    window_tokens: int = Field(256, ge=2, description="Tokens per evaluation window.")
    max_windows: int = Field(48, ge=0, description="Windows per public text; 0 takes all.")
    baselines: bool = Field(
        True,
        description=(
            "Compare the result with what clients get alone and with pooled data. `false` leaves"
            " both out, as `local-only = false` and `centralized = 'off'` do together; the dense"
            " model is always measured, and with `sft-p` and `fedspine` clients' own models, which"
            " are the result."
        ),
    )
    local_only: bool = Field(
        True,
        description=(
            "Clients evaluate the result that they get alone on the public text. With a tuning"
            " method this takes them another training."
        ),
    )
    own_text: bool = Field(
        False,
        description=(
            "Clients also evaluate the dense, their own and the federated model on text of their"
            " own: a tenth of their passages or items, never used for pruning or training. Only"
            " mean losses leave them, in which no prediction counts over 20 nats. A site of a"
            " deployment must allow it, with `own-text` in its configuration."
        ),
    )
    centralized: Literal["auto", "on", "off"] = Field(
        "auto",
        description=(
            "Baseline with the data of all clients in one place; `auto`: in simulation only. `on`"
            " is refused in a deployment."
        ),
    )
    every: int = Field(
        0,
        ge=0,
        description=(
            "After every so many rounds the server measures what they have led to on the public"
            " texts or items (`rounds.json`); of methods that average adapters. 0: only at the end."
        ),
    )

    @field_validator("texts")
    @classmethod
    def _texts_are_named(cls, value: str) -> str:
        names = [part.split("=", 1)[0].strip() for part in value.split(",")]
        for part, name in zip(value.split(","), names, strict=True):
            if not name or ("=" not in part and name not in BUILT_IN_TEXTS):
                raise ValueError(
                    f"{part.strip()!r} is neither 'documentation' nor 'code' nor 'name=path'"
                )
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
        return {
            name.strip(): path.strip() for name, _, path in (part.partition("=") for part in parts)
        }


class RunSettings(Table):
    """All settings of one run."""

    method: str = Field(
        DEFAULT_METHOD,
        description="What the run does; the method's own settings are in the table of its name.",
    )
    model: str = Field(
        "demo",
        min_length=1,
        description=(
            "`demo`, or the directory of a model in safetensors: LLaMA, Mistral, Qwen2, Qwen3 or"
            " OPT; for tuning also BERT or RoBERTa. A model of the Hugging Face hub is downloaded"
            " first: `hf download owner/name --local-dir name`."
        ),
    )
    seed: int = Field(0, ge=0, description="Every random choice is derived from it.")
    num_clients: int = Field(
        8, ge=1, description="Clients that take part: the first of the connected sites, by name."
    )
    quorum: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "Share of the clients that must finish a round; 0: half of them in simulation, all of"
            " them in a deployment."
        ),
    )
    threads: int = Field(
        2,
        ge=1,
        le=1024,
        description="CPU threads of every process. Another number gives other last bits.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description=(
            "Where tensors are computed; `auto` takes CUDA where there is a device. CUDA was not"
            " yet run on hardware."
        ),
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description=(
            "Number format of the forward pass; the result is written in the format of the model's"
            " files."
        ),
    )
    activations: Literal["memory", "disk"] = Field(
        "memory",
        description=(
            "Where the hidden states of the windows are kept between two blocks; `disk`: in a file"
            " without a name, for windows larger than memory."
        ),
    )
    out_dir: str = Field("runs", min_length=1, description="Where run directories are made.")
    resume_from: str = Field("", description="Directory of an interrupted run to continue.")
    part_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        le=1024**3,
        description="Largest payload of one message, in bytes.",
    )
    site_keys: str = Field(
        "",
        description=(
            "Directory on the server with the public key of each site, `NAME.key.pub`, as `espalier"
            " keys` writes it: a node that says a site's name must have its private key (`site-key`"
            " in its own configuration), and sites that are not there are refused. Empty: names are"
            " claims. Not in simulation."
        ),
    )
    enrol_seconds: float = Field(
        120.0, gt=0, description="How long to wait for another client to connect."
    )
    deadline_seconds: float = Field(
        900.0, gt=0, description="How long one message may take before it is sent again."
    )
    attempts: int = Field(2, ge=1, description="How often one message is sent.")
    round_seconds: float = Field(
        0.0,
        ge=0,
        description=(
            "How long a round may take with all its messages; then it ends with the clients that"
            " have answered, if they are the quorum, and the others are dropped. 0: a day, or ten"
            " times `deadline-seconds` times `attempts` if that is longer; in simulation without a"
            " limit."
        ),
    )
    export_check: Literal["streamed", "transformers"] = Field(
        "streamed",
        description=(
            "How plain transformers and peft load a result to check it, for every method, at the"
            " server and at clients that write a model of their own. `streamed`: the weights stay"
            " in the files, and each module's are read when the module computes, so that models"
            " larger than memory can be checked; a base model in NF4, which bitsandbytes cannot"
            " read so, is loaded whole in 4 bits to check an adapter. `transformers`: the whole"
            " model is in memory."
        ),
    )
    data: DataSettings = DataSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    federation: FederationSettings = FederationSettings()
    lora: LoraSettings = LoraSettings()
    training: TrainingSettings = TrainingSettings()
    task: TaskSettings = TaskSettings()
    job: SerializeAsAny[MethodSettings] = Field(
        default_factory=lambda: settings_of(DEFAULT_METHOD)()
    )
    """The chosen method's own table, in files under the method's name."""

    @property
    def tunes(self) -> bool:
        """Whether clients train in this run, on sequences of a task or text; else they read calibration windows."""
        return METHODS[self.method].tunes

    @property
    def clients_evaluate(self) -> bool:
        """True if clients evaluate on the public texts or items: local baselines or models of their own.

        Models of their own are the result, and no baseline.
        """
        wanted = self.evaluation.baselines or isinstance(self.job, PersonalModelSettings)
        return self.evaluation.local_only and wanted

    def makes_centralized(self, *, simulation: bool) -> bool:
        """Return whether the server makes the centralized baseline."""
        return simulation and self.evaluation.baselines and self.evaluation.centralized != "off"

    def of(self, kind: type[J]) -> J:
        """The chosen method's own table, which must be of a kind."""
        if not isinstance(self.job, kind):
            raise TypeError(f"method {self.method} has no {kind.__name__}")
        return self.job

    def without_proximal(self) -> "RunSettings":
        """These settings without FedProx, for a method that pulls elsewhere."""
        return self.model_copy(
            update={"training": self.training.model_copy(update={"proximal": 0.0})}
        )

    def with_quorum(self, *, simulation: bool) -> "RunSettings":
        """These settings with a quorum: where they name none, half of the clients in simulation, else all of them."""
        return (
            self
            if self.quorum
            else self.model_copy(update={"quorum": SIMULATED_QUORUM if simulation else 1.0})
        )

    def nested(self) -> dict[str, Any]:
        """Plain values under hyphenated keys, without the tables that the chosen method does not have."""
        others = all_tables() - set(tables_of(self.method))
        values = {
            key: value for key, value in self.model_dump(by_alias=True).items() if key not in others
        }
        return {
            **{key: value for key, value in values.items() if key != JOB},
            self.method: values[JOB],
        }

    def digest(self) -> str:
        """SHA-256 of all settings that the result depends on."""
        values = {
            key: value for key, value in self.nested().items() if key not in NOT_PART_OF_THE_RESULT
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parse(
    flat: Mapping[str, Any], *, simulation: bool = False, by_hand: Collection[str] = ()
) -> RunSettings:
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
    method = nested.get("method", DEFAULT_METHOD)
    mistakes = [
        f"{key} = {flat[key]!r}: is a table, set its keys" for key in sorted(tables & flat.keys())
    ]
    mistakes += (
        [f"{JOB}: unknown key; a method's table has its name"]
        if nested.pop(JOB, None) is not None
        else []
    )
    if not isinstance(method, str) or method not in METHODS:
        mistakes.append(f"method = {method!r}: choose one of {', '.join(sorted(METHODS))}")
    else:
        mistakes += _unread_by_hand(flat, method, by_hand)
    found, more = _validated(nested, method)
    mistakes += more + _wrong_combinations(nested, simulation) + _contradictions(nested)
    if found is None or mistakes:
        raise Mistake(
            "the run's settings are wrong:\n" + "\n".join(f"  {line}" for line in mistakes)
        )
    return found


def _validated(nested: Mapping[str, Any], method: Any) -> tuple[RunSettings | None, list[str]]:
    """The settings, if every single value is one, and a line for each that is not."""
    known = isinstance(method, str) and method in METHODS
    others = all_tables() - set(tables_of(method) if known else ())
    chosen = {key: value for key, value in nested.items() if key not in others and key != method}
    job = None
    mistakes = list[str]()
    if known:
        try:
            job = chosen[JOB] = settings_of(method).model_validate(nested.get(method, {}))
        except ValidationError as error:
            mistakes = mistake_lines(error, _keys_for(method), method)
    try:
        settings = RunSettings.model_validate(
            chosen if known else {**chosen, "method": DEFAULT_METHOD}
        )
    except ValidationError as error:
        return None, mistake_lines(error, _keys_for(method)) + mistakes
    if job is None:
        return None, mistakes
    return settings.model_copy(update={"federation": settings.federation.for_method(job)}), mistakes


def _contradictions(nested: Mapping[str, Any]) -> list[str]:
    """What does not fit within a method's table, or it and those that it shares with others; unless one is wrong anyway."""
    method = nested.get("method", DEFAULT_METHOD)
    if not isinstance(method, str) or method not in METHODS:
        return []
    num_clients = nested.get("num-clients", RunSettings.model_fields["num_clients"].default)
    if not isinstance(num_clients, int) or num_clients < 1:
        return []
    try:
        job = settings_of(method).model_validate(nested.get(method, {}))
        federation = FederationSettings.model_validate(nested.get("federation", {})).for_method(job)
        lora = LoraSettings.model_validate(nested.get("lora", {}))
    except ValidationError:
        return []
    lines = job.contradictions(method, federation, lora, num_clients)
    if "client-weights" in job.FEDERATION and federation.client_weights not in job.WEIGHTS:
        allowed = " or ".join(map(repr, ("paper", *job.WEIGHTS)))
        lines.append(
            f"federation.client-weights = '{federation.client_weights}': {method} knows {allowed}"
        )
    return lines


def concerns(key: str, method: Any) -> bool:
    """Whether a method reads a table, or a key of one; what is in no method's table concerns all of them."""
    own = tables_of(method) if isinstance(method, str) else ()
    table = key.partition(".")[0]
    return table in own or table not in all_tables()


def changed(flat: Mapping[str, Any]) -> set[str]:
    """Keys whose values are not the defaults, unknown keys among them."""
    known = default_values()
    return {key for key, value in flat.items() if key not in known or known[key] != value}


def tables() -> dict[str, type[Table]]:
    """All tables by name: those of every run, those that methods share, and each method's own."""
    found: dict[str, type[Table]] = {}
    for name, field in RunSettings.model_fields.items():
        kind: Any = field.annotation
        if name != JOB and isinstance(kind, type) and issubclass(kind, Table):
            found[name] = kind
    return found | {method: settings_of(method) for method in METHODS}


def default_values() -> dict[str, Any]:
    """All keys, dotted, and their defaults."""
    known = {
        key: value
        for key, value in RunSettings().model_dump(by_alias=True).items()
        if not isinstance(value, dict)
    }
    for table, kind in tables().items():
        known |= {
            f"{table}.{key}": value for key, value in kind().model_dump(by_alias=True).items()
        }
    return known


def _keys_for(method: Any) -> list[str]:
    """All keys, dotted; first those that the method reads, which an unknown key is more likely meant to be."""
    return sorted(default_values(), key=lambda key: not concerns(key, method))


def unread(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Keys of tables that the method has which it does not read all the same; see ``not_read``."""
    tuning = tuple(method for method, row in METHODS.items() if row.tunes)
    pruning = tuple(method for method in METHODS if method not in tuning)
    values = default_values() | dict(flat)
    return not_read(values, tuning, pruning) | _not_read_in_tables(values)


def _not_read_in_tables(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The same of the tables that the method has, as they say it of themselves (``FEDERATION``, ``Table.READ_WITH``)."""
    found: dict[str, tuple[str, str]] = {}
    method = str(flat["method"])
    kinds = tables()
    if method in METHODS and flat["federation.client-weights"] == "paper":
        flat = {**flat, "federation.client-weights": settings_of(method).WEIGHTS[0]}
    for field in (
        FederationSettings.model_fields.values() if "federation" in tables_of(method) else ()
    ):
        readers = tuple(name for name in METHODS if field.alias in settings_of(name).FEDERATION)
        if method not in readers:
            found[f"federation.{field.alias}"] = ("method", one_of("method", readers))
    for table in ("evaluation", *tables_of(method)):
        for key, conditions in kinds[table].READ_WITH.items():
            for choice, values in conditions.items():
                chosen, whole = (
                    name if "." in name else f"{table}.{name}" for name in (choice, key)
                )
                if flat[chosen] not in values:
                    known = () if "." in choice else _possible(method, kinds[table], choice)
                    remedy = one_of(
                        chosen, tuple(value for value in values if value in known or not known)
                    )
                    found.setdefault(whole, (chosen, remedy))
    return found


def _possible(method: str, table: type[Table], key: str) -> tuple[Any, ...]:
    """The values that a key may have with a method, where they can be listed."""
    if (table, key) == (FederationSettings, "client-weights"):
        return settings_of(method).WEIGHTS
    field = table.model_fields[key.replace("-", "_")]
    return (True, False) if field.annotation is bool else get_args(field.annotation)


def _unread_by_hand(flat: Mapping[str, Any], method: str, by_hand: Collection[str]) -> list[str]:
    """A line per key that somebody gave by hand and that is not read."""
    if not by_hand:
        return []
    found = unread(flat)
    values = default_values() | dict(flat)
    lines = []
    for key in sorted(by_hand):
        if not concerns(key, method) and key in default_values():
            lines.append(_unread(key, flat[key], method))
        elif not concerns(key, method):
            lines.append(unknown_key(key, _keys_for(method)))
        elif key in found:
            choice, remedy = found[key]
            why = f"{choice} = {values[choice]!r} does not read it"
            lines.append(f"{key} = {flat[key]!r}: {why}; leave it out, or choose {remedy}")
    return lines


def _unread(key: str, value: Any, method: str) -> str:
    """The line on a key that somebody gave by hand to a method that does not read it."""
    table, _, name = key.partition(".")
    readers = [other for other in sorted(METHODS) if table in tables_of(other)]
    kinds = tables()
    namesakes = [
        f"{own}.{name}"
        for own in tables_of(method)
        if any(f.alias == name for f in kinds[own].model_fields.values())
    ]
    remedies = [f"set {' or '.join(namesakes)}"] if namesakes else ["leave it out"]
    remedies.append(f"choose method = {' or '.join(map(repr, readers))}")
    return f"{key} = {value!r}: method = {method!r} does not read it; {', or '.join(remedies)}"


def _wrong_combinations(nested: Mapping[str, Any], simulation: bool) -> list[str]:
    """Keys that do not fit each other; looked for also when single values are wrong, so that all is told at once."""
    keys = nested.get("site-keys", "")
    lines = (
        [f"site-keys = {keys!r}: simulated clients have no keys; leave it out"]
        if simulation and keys
        else []
    )
    data = nested.get("data", {})
    if not isinstance(data, Mapping):
        return lines
    source = data.get("source", "documentation")
    path = data.get("path", "")
    partition = data.get("partition", "iid")
    field = data.get("partition-field", "")
    task = nested.get("task", {})
    tuned = "task" in tables_of(str(nested.get("method")))
    name = task.get("name", TEXT) if tuned and isinstance(task, Mapping) else TEXT
    if isinstance(path, str) and "{rank}" in path:
        lines.append(
            f"data.path = '{path}': a client's number is written {{client}}; a rank is that of an"
            " adapter"
        )
    if (
        partition in ("by-field", "dirichlet")
        and name == TEXT
        and (source not in ("jsonl", "hub") or not field)
    ):
        lines.append(
            f"data.partition = '{partition}': needs data.source = 'jsonl' or 'hub' and"
            " data.partition-field"
        )
    # Sites of a deployment have records of their own.
    if simulation and name != TEXT and source not in ("jsonl", "hub"):
        lines.append(f"task.name = '{name}': needs data.source = 'jsonl' or 'hub', not '{source}'")
    if partition != "iid" and source in BUILT_IN_TEXTS:
        lines.append(
            f"data.partition = '{partition}': '{source}' has one source per client; set data.source"
        )
    if partition == "by-file" and source == "hub":
        lines.append(
            "data.partition = 'by-file': a Hugging Face dataset has no files to hand out; choose"
            " another partition"
        )
    if (
        simulation
        and source in ("text", "jsonl", "hub")
        and not path
        and not (source == "hub" and name != TEXT)
    ):
        lines.append(
            f"data.path = '': data.source = '{source}' needs the path of a file or the name of a"
            " dataset"
        )
    test_path = task.get("test-path") if name != TEXT else None
    if _is_a_clients(
        test_path, path, nested.get("num-clients", RunSettings.model_fields["num_clients"].default)
    ):
        lines.append(
            f"task.test-path = '{test_path}': clients train on these items (data.path); name a file"
            " of others"
        )
    if source in BUILT_IN_TEXTS and path:
        lines.append(
            f"data.path = '{path}': set data.source to 'text', 'jsonl' or 'hub', or leave the path"
            " empty"
        )
    return lines


def _is_a_clients(test_path: Any, path: Any, num_clients: Any) -> bool:
    """Whether a path is that of the clients' file, or with ``{client}`` that of one client's; False for what is no path."""
    if not (isinstance(test_path, str) and isinstance(path, str) and test_path and path):
        return False
    tested = _resolved(test_path)
    trained = _resolved(path)
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
