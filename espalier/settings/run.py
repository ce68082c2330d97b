"""Settings of a run: all of ``[tool.flwr.app.config]``, validated together."""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args

from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from espalier.errors import InputError
from espalier.settings.federation import OF_THE_METHOD, FederationSettings
from espalier.settings.lora import LoraSettings
from espalier.settings.method import MethodSettings
from espalier.settings.methods import METHODS, all_tables, settings_of, tables_of
from espalier.settings.own_task import CLASSIFICATION, OWN_TASKS, listed_labels, prompt_fields
from espalier.settings.privacy import (
    PrivacySettings,
    privacy_contradictions,
    unread_for_privacy,
)
from espalier.settings.pruning import PersonalModelSettings
from espalier.settings.table import Columns, ReadWith, Table, mistake_lines, unknown_key
from espalier.settings.task import CHAT, TEXT, TaskSettings, tasks
from espalier.settings.training import TrainingSettings

J = TypeVar("J", bound=MethodSettings)

BUILT_IN_TEXTS = ("documentation", "code")
"""Texts that need no file, because every Python installation contains them."""

PARTITIONS = ("iid", "by-file", "by-field", "by-group", "dirichlet", "quantity")
FLOWER = "flwr:"
FLOWER_NAME = f"{FLOWER}NAME"
"""Beginning of ``data.partition`` for a partitioner of flwr-datasets, and words for any of them."""

OWN_TEXT = "own-text"
"""Name of the clients' own held-out text among the evaluation texts."""

MAX_TEXTS = 16
"""Maximum number of evaluation texts; each is one evaluation of every client's own result."""

SIMULATED_QUORUM = 0.5

LEAST_OF_A_SUM = 3
MOST_OF_A_SUM = 900
"""Numbers of clients with which ``federation.secure-sum`` works.

Of two clients, each would know the other's tensors from the sum. The keys of more than 900 do not
fit into one field of a message.
"""

DEFAULT_METHOD = "fedprllm"

JOB = "job"
"""Field that holds the chosen method's own table; not a valid key in a file."""

NOT_PART_OF_THE_RESULT = (
    "out-dir", "resume-from", "deadline-seconds", "enrol-seconds", "attempts", "round-seconds", "activations", "quorum",
    "site-keys", "tracking",
)  # fmt: skip
"""Settings that may differ between a run and its resumption.

The ``settings.toml`` of a run holds the quorum that 0 stands for.
"""


class DataSettings(Table):
    """Table ``[data]``: each client's private text.

    A node's own configuration takes precedence.
    """

    READ_WITH: ClassVar[ReadWith] = {
        "field": {"source": ("files", "hub")},
        "columns": {"source": ("files", "hub")},
        "group": {"source": ("files", "hub")},
        "hub-config": {"source": ("hub",)},
        "hub-split": {"source": ("files", "hub")},
        "partition-field": {"partition": ("by-field", "dirichlet", FLOWER_NAME)},
        "partition-arguments": {"partition": (FLOWER_NAME,)},
        "alpha": {"partition": ("dirichlet", "quantity")},
    }

    source: Literal["auto", "documentation", "code", "files", "hub"] = Field(
        "auto",
        description=(
            "Source of a client's text: `documentation` (parts of Python's documentation), `code`"
            " (source code of Python's standard library without docstrings, on which the demo model"
            " was not trained), `files` (those of `path`) or `hub` (a dataset of the Hugging Face"
            " hub; needs the extra `hub`). `auto`: `files` if there is a `path`, otherwise"
            " `documentation`. A site of a deployment reads the data that its own configuration"
            " names instead."
        ),
    )
    path: str = Field(
        "",
        description=(
            "File, directory or pattern (`notes/*.parquet`), or with `hub` the name of a dataset"
            " (empty: the task's own dataset). The ending of a file's name gives its format:"
            " `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`; other files are text, and may"
            " be compressed (`.gz`, `.zst`). `{client}` stands for the client's number; without it"
            " the records are distributed over the clients."
        ),
    )
    field: str = Field("text", min_length=1, description="Field of a record that holds the text.")
    hub_config: str = Field("", description="Configuration name of the Hugging Face dataset.")
    hub_split: str = Field(
        "",
        description=(
            "Split of the Hugging Face dataset, or of a folder that `datasets` saved. Empty:"
            " `train` for text, and the task's own training split for a task."
        ),
    )
    columns: Columns = Field(
        "",
        description=(
            "Fields of the records of a task that have other names than the task's, as"
            " `needed=there` pairs: `instruction=question,response=answer`. `espalier tasks` lists"
            " what each task needs."
        ),
    )
    prompt: str = Field(
        "",
        description=(
            "Prompt of the tasks `completion` and `classification`, with the fields of a record in"
            " braces: `{question}\\n`. The answer follows after a space, unless the prompt ends with"
            " blank space. Every client uses it."
        ),
    )
    labels: str = Field(
        "",
        description="Labels of the task `classification`, comma-separated: `negative,positive`.",
    )
    group: str = Field(
        "",
        description=(
            "Field whose value joins records that belong together, such as a patient or an author:"
            " a group is never divided between clients, nor between training and held-out text."
        ),
    )
    partition: str = Field(
        "iid",
        description=(
            "Distribution of one file over simulated clients: `iid` (evenly at random), `by-file`"
            " (one file of the directory per client), `by-field` (whole labels), `by-group` (whole"
            " groups), `dirichlet` (uneven labels), `quantity` (uneven sizes), or a partitioner of"
            " flwr-datasets, such as `flwr:PathologicalPartitioner` (extra `partitioners`)."
        ),
    )
    partition_field: str = Field(
        "",
        description=(
            "Field that labels a record of text, for partitions by labels; a task has its own"
            " labels."
        ),
    )
    partition_arguments: str = Field(
        "",
        description=(
            "Arguments of a partitioner of flwr-datasets as TOML, such as"
            " `num_classes_per_partition=2, shuffle=false`. It gets the number of clients, the"
            " labels or groups, and a seed from the run."
        ),
    )
    alpha: float = Field(
        0.5,
        gt=0,
        description=(
            "Evenness of the distribution with `dirichlet` and `quantity`; smaller values are more"
            " uneven."
        ),
    )
    num_samples: int = Field(
        8, ge=1, description="Number of calibration samples per client, for methods that prune."
    )
    sequence_length: int = Field(
        256,
        ge=2,
        description=(
            "Tokens per sample of a client's text; at most the model's number of positions."
        ),
    )

    @field_validator("prompt")
    @classmethod
    def _prompt_names_fields(cls, value: str) -> str:
        if value:
            prompt_fields(value)
        return value

    @field_validator("labels")
    @classmethod
    def _labels_are_a_list(cls, value: str) -> str:
        if value:
            listed_labels(value)
        return value

    @field_validator("partition")
    @classmethod
    def _is_partition(cls, value: str) -> str:
        if value not in PARTITIONS and not re.fullmatch(rf"{FLOWER}\w+", value):
            raise ValueError(f"choose one of {', '.join(PARTITIONS)} or {FLOWER_NAME}")
        return value

    @field_validator("partition_arguments")
    @classmethod
    def _are_arguments(cls, value: str) -> str:
        try:
            arguments = arguments_of(value)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(
                f"is not TOML ({error}); write name=value, name='text', name=[1, 2]"
            ) from None
        if fixed := {"num_partitions", "partition_by"} & arguments.keys():
            raise ValueError(
                f"{', '.join(sorted(fixed))} cannot be set here; set num-clients, and"
                " data.partition-field or data.group"
            )
        return value

    @property
    def partitioner(self) -> str:
        """Name of a partitioner of flwr-datasets; empty for the program's own partitions."""
        return self.partition.removeprefix(FLOWER) if self.partition.startswith(FLOWER) else ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the partitioner by name."""
        return arguments_of(self.partition_arguments)

    @property
    def origin(self) -> str:
        """Source, with ``auto`` replaced by what it stands for."""
        return source_of(self.source, self.path)


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments in ``partition-arguments``; raise TOMLDecodeError if it is not TOML."""
    arguments: dict[str, Any] = tomllib.loads(f"of = {{{text}}}")["of"]
    return arguments


def source_of(source: str, path: str) -> str:
    """Return the source of a client's text; ``auto`` depends on whether a path is given."""
    return ("files" if path else "documentation") if source == "auto" else source


class EvaluationSettings(Table):
    """Table ``[evaluation]``: public texts and baselines with which models are compared."""

    READ_WITH: ClassVar[ReadWith] = {"centralized": {"baselines": (True,)}}

    texts: str = Field(
        "documentation",
        description=(
            "Evaluation texts on which models are compared, comma-separated, at most 16:"
            " `documentation` and `code` (10% of the passages, which no client has), or `name=path`"
            " for a text file."
        ),
    )
    sequence_length: int = Field(256, ge=2, description="Tokens per sample of an evaluation text.")
    max_samples: int = Field(
        48, ge=0, description="Maximum number of samples per evaluation text; 0: all."
    )
    baselines: bool = Field(
        True,
        description=(
            "Compare the result with the local baselines and the centralized baseline. `false`"
            " leaves both out, like `local-baseline = false` and `centralized = 'off'` together. The"
            " dense model is always evaluated. With `sft-p` and `fedspine` so are the clients' own"
            " models, because they are the result."
        ),
    )
    local_baseline: bool = Field(
        True,
        description=(
            "Clients evaluate their local baselines on the evaluation texts. With a tuning method"
            " this takes them another training. With `sft-p` and `fedspine` they evaluate their own"
            " models, which are the result."
        ),
    )
    own_text: bool = Field(
        False,
        description=(
            "Clients also evaluate the dense model, their own model and the federated model on"
            " held-out text of their own: 10% of their passages or items, which are never used for"
            " pruning or training. Only mean losses leave a client; the loss of each prediction is"
            " capped at 20 nats. A site of a deployment must allow it with `own-text` in its"
            " configuration."
        ),
    )
    centralized: Literal["auto", "off"] = Field(
        "auto",
        description=(
            "Compute the centralized baseline, which uses the data of all clients in one place."
            " `auto`: only in a simulation."
        ),
    )
    every: int = Field(
        0,
        ge=0,
        description=(
            "Number of rounds between evaluations at the server on the evaluation texts or test"
            " items (`rounds.json`), for methods that average adapters; 0: only at the end."
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
        if len(names) > MAX_TEXTS:
            raise ValueError(f"{len(names)} texts, at most {MAX_TEXTS} are evaluated on")
        return value

    def named_texts(self) -> dict[str, str]:
        """Return the file path of each text by its name; the path of a built-in text is empty."""
        parts = [part.strip() for part in self.texts.split(",")]
        return {
            name.strip(): path.strip() for name, _, path in (part.partition("=") for part in parts)
        }


class RunSettings(Table):
    """All settings of one run."""

    method: str = Field(
        DEFAULT_METHOD,
        description="Method of the run; its own settings are in the table with its name.",
    )
    model: str = Field(
        "demo",
        min_length=1,
        description=(
            "`demo`, the directory of a model in safetensors format, or `owner/name[@revision]` of"
            " the Hugging Face hub, which is downloaded (a directory of that name wins): LLaMA,"
            " Mistral, Qwen2, Qwen3, Gemma, Granite, OLMo 2, Phi, SmolLM3 or OPT, and for tuning"
            " also Mixtral, Qwen3-MoE, BERT or RoBERTa."
        ),
    )
    seed: int = Field(0, ge=0, description="Seed from which every random choice is derived.")
    num_clients: int = Field(
        8,
        ge=1,
        description=(
            "Number of clients: the first of the connected sites in the order of their names."
        ),
    )
    quorum: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "Fraction of the clients that must finish a round. 0: half of them in a simulation,"
            " all of them in a deployment."
        ),
    )
    threads: int = Field(
        2,
        ge=1,
        le=1024,
        description=(
            "CPU threads of every process. Another number can change the last bits of results."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description=("Device for tensor computations; `auto`: CUDA if there is a device.")
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description=(
            "Number format of the forward pass; the result is written in the format of the model's"
            " files."
        ),
    )
    attention: Literal["sdpa", "flash_attention_2", "eager"] = Field(
        "sdpa",
        description=(
            "Implementation of attention in transformers. `flash_attention_2` needs a CUDA device,"
            " the package flash-attn, and `bfloat16` or `float16`."
        ),
    )
    activations: Literal["memory", "disk"] = Field(
        "memory",
        description=(
            "Storage of the samples' hidden states between two blocks; `disk`: in an unnamed file,"
            " for calibration sets that do not fit in memory."
        ),
    )
    out_dir: str = Field(
        "runs", min_length=1, description="Directory in which run directories are created."
    )
    resume_from: str = Field("", description="Directory of an interrupted run to resume.")
    tracking: Literal["none", "tensorboard", "trackio", "wandb", "mlflow"] = Field(
        "none",
        description=(
            "Tool for which the server records settings and figures of the run; each needs the"
            " extra of its name. `tensorboard` and `wandb` write into the run directory, `trackio`"
            " and `mlflow` into `out-dir`. Sites never write for it."
        ),
    )
    part_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        le=1024**3,
        description="Maximum payload of one message in bytes.",
    )
    site_keys: str = Field(
        "",
        description=(
            "Directory on the server with the public key of each site, `NAME.key.pub`, as written"
            " by `espalier keys`. A node that claims a site's name must have its private key"
            " (`site-key` in its own configuration), and sites without a public key there are"
            " refused. Empty: names are not verified. Not in a simulation."
        ),
    )
    enrol_seconds: float = Field(
        120.0,
        gt=0,
        description=(
            "Seconds to wait for the next client to connect. The first answer of a connected client"
            " is waited for up to `deadline-seconds`."
        ),
    )
    deadline_seconds: float = Field(
        900.0, gt=0, description="Seconds until a message without a reply is sent again."
    )
    attempts: int = Field(2, ge=1, description="Maximum number of times that a message is sent.")
    round_seconds: float = Field(
        0.0,
        ge=0,
        description=(
            "Maximum duration in seconds of a round with all its messages. Then the round ends"
            " with the clients that have answered, if they are a quorum, and the others are"
            " dropped. 0: a day, or ten times `deadline-seconds` times `attempts` if that is"
            " longer; in a simulation no limit."
        ),
    )
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
    def num_classes(self) -> int:
        """Number of classes for an encoder; 0 if encoders cannot do the task."""
        if self.task.name == TEXT:
            return 0
        if self.task.name == CLASSIFICATION:
            return len(listed_labels(self.data.labels))
        return len(tasks()[self.task.name].classes)

    @property
    def clients_evaluate(self) -> bool:
        """True if clients evaluate local baselines or models of their own on public texts or items.

        Models of their own are the result and no baseline.
        """
        wanted = self.evaluation.baselines or isinstance(self.job, PersonalModelSettings)
        return self.evaluation.local_baseline and wanted

    def makes_centralized(self, *, simulation: bool) -> bool:
        """Return whether the server makes the centralized baseline."""
        chosen = self.evaluation
        return simulation and chosen.baselines and chosen.centralized == "auto"

    def of(self, kind: type[J]) -> J:
        """Return the chosen method's own table, typed as ``kind``.

        Raises
        ------
        TypeError
            The table is of another kind.
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
        return {
            **{key: value for key, value in values.items() if key != JOB},
            self.method: values[JOB],
        }

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
    method = nested.get("method", DEFAULT_METHOD)
    if not isinstance(method, str) or method not in METHODS:
        mistakes.append(f"method = {method!r}: choose one of {', '.join(sorted(METHODS))}")
        method = nested["method"] = None
    else:
        mistakes += _unread_by_hand(flat, method, by_hand)
    valid, more = _validated_tables(nested, method)
    mistakes += more
    settings = None
    top = {key: value for key, value in nested.items() if key not in {*all_tables(), *_GENERAL}}
    try:
        settings = RunSettings.model_validate(top | valid | {"method": method or DEFAULT_METHOD})
    except ValidationError as error:
        mistakes += mistake_lines(error, _keys_for(method))
    if settings is not None and "privacy" in valid:
        mistakes += _imprecise_sums(settings)
    num_clients = top.get("num-clients", RunSettings.model_fields["num_clients"].default)
    num_clients = num_clients if isinstance(num_clients, int) else 0
    if method and JOB in valid and num_clients > 0:
        mistakes += _contradictions(method, valid, num_clients)
    mistakes += _no_secure_sum(nested, method, num_clients)
    if simulation and (keys := nested.get("site-keys")):
        mistakes.append(f"site-keys = {keys!r}: simulated clients have no keys; leave it out")
    if "data" in valid and ("task" in valid or "task" not in tables_of(method or "")):
        task = valid.get("task", TaskSettings())
        mistakes += _wrong_combinations(valid["data"], task, num_clients, simulation)
    if settings is None or mistakes:
        raise InputError(
            "the run's settings are wrong:\n" + "\n".join(f"  {line}" for line in mistakes)
        )
    return settings


_GENERAL = {"data": DataSettings, "evaluation": EvaluationSettings, "privacy": PrivacySettings}
"""Tables that every method reads."""


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
    for name in (*_GENERAL, *tables_of(method or "")):
        try:
            valid[JOB if name == method else name] = kinds[name].model_validate(
                nested.get(name, {})
            )
        except ValidationError as error:
            mistakes += mistake_lines(error, _keys_for(method), name)
    if JOB in valid:
        federation = valid.get("federation", FederationSettings())
        valid["federation"] = federation.for_method(valid[JOB])
    return valid, mistakes


def _imprecise_sums(settings: RunSettings) -> list[str]:
    """Return an error line if private sums would depend on which records are computed together."""
    if not settings.privacy.on or settings.tunes or settings.dtype == "float32":
        return []
    return [
        f"dtype = '{settings.dtype}': numbers of a record would change with the records that pass"
        f" together with it; with privacy.epsilon = {settings.privacy.epsilon:g} set it to 'float32'"
    ]


def _contradictions(method: str, valid: Mapping[str, Any], num_clients: int) -> list[str]:
    """Return an error line per conflict within a method's table or with the shared tables."""
    job = valid[JOB]
    federation = valid["federation"]
    lora = valid.get("lora", LoraSettings())
    lines: list[str] = job.contradictions(method, federation, lora, num_clients)
    if "aggregation-rule" in job.FEDERATION:
        lines += federation.rule_mistakes(method, job, num_clients)
    if "client-weights" in job.FEDERATION and federation.client_weights not in job.WEIGHTS:
        allowed = " or ".join(map(repr, ("paper", *job.WEIGHTS)))
        lines.append(
            f"federation.client-weights = '{federation.client_weights}': {method} knows {allowed}"
        )
    lines += _too_few_sampled(federation, num_clients)
    if federation.secure_sum and METHODS[method].summands:
        fault = job.secure_sum_fault(federation) or federation.secure_sum_fault()
        lines += [f"federation.secure-sum = true: {fault}"] if fault else []
    # Tables that are wrong are missing here, and reported already.
    if {*_GENERAL, *tables_of(method)} - {method} <= valid.keys():
        lines += privacy_contradictions(method, job, valid, private_methods(), num_clients)
    return lines


def _no_secure_sum(nested: Mapping[str, Any], method: str | None, num_clients: int) -> list[str]:
    """Return an error line per reason why the clients' tensors cannot be summed secretly."""
    given = nested.get("federation")
    if method is None or not isinstance(given, Mapping) or not given.get("secure-sum"):
        return []
    key = "federation.secure-sum = true"
    row = METHODS[method]
    able = ", ".join(name for name, other in METHODS.items() if other.summands)
    if not row.summands:
        why = row.summands_reason or "has no sum of which the server could do with the total alone"
        return [f"{key}: {method} {why}; leave it out, or choose one of {able}"]
    if not LEAST_OF_A_SUM <= num_clients <= MOST_OF_A_SUM:
        return [
            f"{key}: needs num-clients between {LEAST_OF_A_SUM} and {MOST_OF_A_SUM}, not"
            f" {num_clients}"
        ]
    return []


def _too_few_sampled(federation: FederationSettings, num_clients: int) -> list[str]:
    """Return an error line if the clients of a round are too few for a secure sum."""
    sampled = federation.clients_of_round(num_clients)
    if not federation.secure_sum or sampled >= LEAST_OF_A_SUM:
        return []
    return [
        f"federation.sampled-clients = {federation.sampled_clients:g}: takes {sampled} of"
        f" num-clients = {num_clients} into a round, and a secure sum needs {LEAST_OF_A_SUM}; raise"
        " it, or num-clients"
    ]


def private_methods(mechanism: str = "") -> tuple[str, ...]:
    """Return the methods that have a mechanism of differential privacy, or this one."""
    found = {name: settings_of(name).MECHANISM for name in METHODS}
    return tuple(name for name, own in found.items() if own and mechanism in ("", own))


def concerns(key: str, method: Any) -> bool:
    """Return whether a method reads a table or its keys.

    A key whose table belongs to no method concerns all methods.
    """
    own = tables_of(method) if isinstance(method, str) else ()
    table = key.partition(".")[0]
    return table in own or table not in all_tables()


def changed(flat: Mapping[str, Any]) -> set[str]:
    """Return the keys whose values differ from the defaults, including unknown keys."""
    known = default_values()
    return {key for key, value in flat.items() if key not in known or known[key] != value}


def tables() -> dict[str, type[Table]]:
    """Return all tables by name: general tables, shared tables and each method's own table."""
    found: dict[str, type[Table]] = {}
    for name, field in RunSettings.model_fields.items():
        kind: Any = field.annotation
        if name != JOB and isinstance(kind, type) and issubclass(kind, Table):
            found[name] = kind
    return found | {method: settings_of(method) for method in METHODS}


def default_values() -> dict[str, Any]:
    """Return the default value of every dotted key."""
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
    """Return all dotted keys, the ones that the method reads first, for suggestions."""
    return sorted(default_values(), key=lambda key: not concerns(key, method))


def unread(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the keys that the run does not read although its method has their table.

    Returns
    -------
    dict
        From an unread key to the key whose value is the reason, and to the values, in words, with
        which it would be read.
    """
    values = default_values() | dict(flat)
    values["data.source"] = source_of(values["data.source"], values["data.path"])
    if str(values["data.partition"]).startswith(FLOWER):
        values["data.partition"] = FLOWER_NAME
    method = str(values["method"])
    mechanism = settings_of(method).MECHANISM if method in METHODS else ""
    for_privacy = unread_for_privacy(values, mechanism, one_of("method", private_methods("dp-sgd")))
    return for_privacy | _not_read_in_tables(values) | _not_read_for_task(values)


def _not_read_for_task(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the keys that are not read with this task, or if each client has its own file."""
    found: dict[str, tuple[str, str]] = {}
    if "{client}" in str(flat["data.path"]):
        own_files = ("data.path", "a data.path without {client}")
        keys = ("partition", "partition-field", "partition-arguments", "alpha")
        found |= dict.fromkeys((f"data.{key}" for key in keys), own_files)
    if "task" not in tables_of(str(flat["method"])):
        tuning = tuple(method for method, row in METHODS.items() if row.tunes)
        of_tasks = ("data.columns", "data.prompt", "data.labels")
        found |= dict.fromkeys(of_tasks, ("method", one_of("method", tuning)))
        return found
    pruning = tuple(method for method, row in METHODS.items() if not row.tunes)
    found["data.num-samples"] = ("method", one_of("method", pruning))
    if flat["task.name"] == TEXT:
        found["data.columns"] = ("task.name", "another task")
        items = ("test-path", "max-test-items", "max-tokens", "max-test-tokens", "packing")
        found |= {f"task.{key}": ("task.name", "another task") for key in items}
    else:
        of_text = ("data.sequence-length", "data.field", "data.partition-field")
        found |= dict.fromkeys(of_text, ("task.name", f"task.name = '{TEXT}'"))
    readers = {
        "data.prompt": OWN_TASKS,
        "data.labels": (CLASSIFICATION,),
        "task.chat-template": (CHAT,),
    }
    for key, names in readers.items():
        if flat["task.name"] not in names:
            found[key] = ("task.name", one_of("task.name", names))
    generated = tuple(name for name, one in tasks().items() if one.generation)
    if flat["task.name"] not in generated:
        found["task.answer-tokens"] = ("task.name", one_of("task.name", generated))
    return found


def _not_read_in_tables(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the unread keys that ``MethodSettings.FEDERATION`` and ``Table.READ_WITH`` declare."""
    found: dict[str, tuple[str, str]] = {}
    method = str(flat["method"])
    kinds = tables()
    own = tables_of(method)
    for key, (default, attribute) in OF_THE_METHOD.items() if method in METHODS else ():
        if flat[f"federation.{key}"] == default:
            flat = {**flat, f"federation.{key}": getattr(settings_of(method), attribute)[0]}
            if key == "aggregation-rule" and flat["federation.secure-sum"]:
                flat["federation.aggregation-rule"] = "mean"
    for field in FederationSettings.model_fields.values() if "federation" in own else ():
        readers = tuple(name for name in METHODS if field.alias in settings_of(name).FEDERATION)
        if method not in readers:
            found[f"federation.{field.alias}"] = ("method", one_of("method", readers))
    for table in (*_GENERAL, *own):
        for key, conditions in kinds[table].READ_WITH.items():
            for choice, values in conditions.items():
                chosen, whole = (
                    name if "." in name else f"{table}.{name}" for name in (choice, key)
                )
                if flat[chosen] not in values:
                    known = () if "." in choice else _possible(method, kinds[table], choice)
                    possible = tuple(value for value in values if value in known or not known)
                    # The first reason for a key is the one that is reported.
                    found.setdefault(whole, (chosen, one_of(chosen, possible)))
    return found


def one_of(key: str, values: tuple[Any, ...]) -> str:
    """Return a choice between values in words, such as ``method = 'a' or 'b'``."""
    return f"{key} = {' or '.join(map(repr, values))}"


def _possible(method: str, table: type[Table], key: str) -> tuple[Any, ...]:
    """Return the values that a key may have with a method; empty if they cannot be listed."""
    if table is FederationSettings and key in OF_THE_METHOD:
        values: tuple[Any, ...] = getattr(settings_of(method), OF_THE_METHOD[key][1])
        return values
    field = table.model_fields[key.replace("-", "_")]
    return (True, False) if field.annotation is bool else get_args(field.annotation)


def _unread_by_hand(flat: Mapping[str, Any], method: str, by_hand: Collection[str]) -> list[str]:
    """Return an error line for each key that was given by hand but is not read."""
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
    """Return the error line for a key by hand whose table the method does not read."""
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


def _wrong_combinations(
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
    if task.name != TEXT and _is_a_clients(task.test_path, path, num_clients):
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
            "data.partition = 'by-file': a Hugging Face dataset has no files to hand out; choose"
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
