"""Settings of each client's private text, with the prompt and labels of a user's own tasks."""

import re
import tomllib
from string import Formatter
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from espalier.settings.table import Columns, ReadWith, Table, comma_separated

PARTITIONS = ("iid", "by-file", "by-field", "by-group", "dirichlet", "quantity")
FLOWER = "flwr:"
FLOWER_NAME = f"{FLOWER}NAME"
"""Beginning of ``data.partition`` for a partitioner of flwr-datasets, and words for any of them."""

COMPLETION = "completion"
CLASSIFICATION = "classification"
ANSWERS = {COMPLETION: "answer", CLASSIFICATION: "label"}
"""Field that the model must give, by tasks whose prompt is ``data.prompt``."""
OWN_TASKS = tuple(ANSWERS)


ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
"""Characters of a template by what follows their backslash; other backslashes are themselves."""
_ESCAPED = re.compile(r"\\([nt\\])")


def prompt_text(template: str) -> str:
    r"""Return a template with line breaks, tabs and backslashes for ``\n``, ``\t`` and ``\\``.

    A shell passes these on as two characters.
    """
    return _ESCAPED.sub(lambda found: ESCAPES[found[1]], template)


def prompt_fields(template: str) -> list[str]:
    """Return the fields that a template names in braces; doubled braces stand for braces.

    Raises ValueError if the template names no field, or has braces that it cannot have.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces") from None
    for _, name, form, conversion in parts:
        if name is not None and (form or conversion or not name or set(name) & set(".[]")):
            raise ValueError(
                "braces may hold the name of a field only, such as {question}; give a field whose"
                " name has a dot or brackets another one in data.columns, such as question=a.b"
            )
    names = list(dict.fromkeys(name for _, name, _, _ in parts if name))
    if not names:
        raise ValueError("names no field of a record; write one in braces, such as {question}")
    return names


def listed_labels(text: str) -> tuple[str, ...]:
    """Return the labels of a comma-separated list (``comma_separated``).

    Raises ValueError if there are fewer than two labels, or one is empty or occurs twice.
    """
    labels = tuple(comma_separated(text))
    if len(labels) < 2 or "" in labels or len(set(labels)) < len(labels):
        raise ValueError("write at least two different labels, separated by commas")
    return labels


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
            " `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`; other files are text, and"
            " may be compressed (`.gz`, `.zst`). `{client}` stands for the client's number; without"
            " it the records are distributed over the clients."
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
            " braces: `{question}\\n`. The answer follows after a space, unless the prompt ends"
            " with blank space. Every client uses it."
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
            "Field that labels a record, for partitions by labels. Empty: the task's own label;"
            " text, `chat`, `completion`, `alpaca` and `gsm8k` have none."
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
