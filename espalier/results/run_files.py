"""Forms of the JSON files of a run directory, as the commands that look at results read them.

A file that was edited by hand or is damaged is refused with the place and the reason, before
anything is computed from it. Keys that no command reads may have any value.
"""

# Pydantic copies defaults for each object.
# ruff: noqa: RUF012

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from espalier.environment.json_form import Form, require_form

Number = float
"""Type that also takes integers."""
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, le=10**18)]


Measured = dict[str, Number | str | list[Number] | None]


def _require_measures(values: Measured) -> Measured:
    """Refuse a measure ``metric/dataset`` that is no number; other values of clients may be."""
    for key, value in values.items():
        if "/" in key and not isinstance(value, float | int | None):
            raise ValueError(f"{key} is no number")
    return values


class _Client(Form):
    client: int
    site: str = ""
    status: str = ""
    reason: str | None = None
    capped: dict[str, Any] = {}
    bytes_up: Count = 0
    bytes_down: Count = 0
    seconds: Seconds = 0
    metrics: Annotated[Measured, AfterValidator(_require_measures)] = {}


class _Size(Form):
    parameters: Number
    bytes: Number | None
    folder: str | None


class _Metric(Form):
    name: str
    dataset: str
    direction: Literal["lower", "higher"]
    values: dict[str, Annotated[float, Field(ge=0)] | None]
    samples_sha256: str | None = None
    chance: Number | None = None
    medians_of_clients: dict[str, Number] = {}


class _Base(Form):
    model: str = ""
    sha256: str = ""
    path: str = ""
    revision: str | None = None
    run: str | None = None
    method: str | None = None


class _SharedNoise(Form):
    dishonest: int
    sites: int


class _Guarantee(Form):
    epsilon: Number
    delta: Number
    noise: str
    shared_noise: _SharedNoise | None = None


class _Missing(Form):
    site: str
    reason: str


class _TestItems(Form):
    number: int


class _Report(Form):
    removed_blocks: list[int] = []
    dropped_blocks: list[int] = []
    groups_of_blocks: list[dict[str, int]] = []
    width: int = 0
    width_of_the_base: int = 0


class _Summary(Form):
    status: str = ""
    reason: str | None = None
    method: str = ""
    model: str = ""
    num_clients: int = 0
    clients: list[_Client] = []
    finished: int | None = None
    missing: list[_Missing] = []
    refused: dict[str, str] = {}
    sparsity: dict[str, Number | str | None] = {}
    size: dict[str, _Size] = {}
    warnings: list[str] = []
    report: _Report = _Report()
    metrics: list[_Metric] = []
    test_items: _TestItems | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: Number = 0
    base: list[_Base] = []
    versions: dict[str, str] = {}
    model_revision: str | None = None
    model_sha256: str | None = None
    privacy: _Guarantee | None = None
    threads: int = 1


class _PlanSeconds(Form):
    round_of_a_client: Number
    teraflops: Number
    measured: bool


class _PlanMeasured(Form):
    server_memory: int
    client_memory: int = 0


class _Plan(Form):
    bytes_up: int
    bytes_down: int
    least_bytes_up: int
    least_bytes_down: int
    client_memory: int
    server_memory: int
    server_disk: int
    seconds: _PlanSeconds
    measured: _PlanMeasured | None = None


class _Seconds(Form):
    run: Number
    clients: dict[str, Annotated[list[Number], Field(min_length=2, max_length=2)]] = {}
    """Seconds and number of rounds by client."""


_Values = dict[str, Number | dict[str, Number | None] | None]


class _Round(Form):
    round: int
    perplexity: _Values = {}
    scores: _Values = {}


class _Rounds(Form):
    rounds: list[_Round]


class _Message(Form):
    direction: Literal["up", "down"] | None
    kind: str
    block: str | None
    wire_bytes: int


class _Model(Form):
    name: str
    dtype: str
    model_memory: Number
    peak_memory: Number
    load_seconds: Number
    prompt_tokens_per_second: Number
    new_tokens_per_second: Number | None


class _Measurements(Form):
    models: list[_Model]
    repetitions: int
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    threads: int
    machine: str
    load: Number | None = None
    cpus: int | None = None


class _Score(Form):
    model: str
    task: str
    metric: str
    value: Number
    stderr: Number | None = None
    items: int
    num_fewshot: int


class _Scores(Form):
    scores: list[_Score]


FORMS: Mapping[str, type[Form]] = {
    "summary.json": _Summary,
    "plan.json": _Plan,
    "seconds.json": _Seconds,
    "rounds.json": _Rounds,
    "ledger.jsonl": _Message,
    "measurements.json": _Measurements,
    "lm_eval.json": _Scores,
}
"""Form of a file's object, or of each line's, by the name of the file."""


def require_run_form(path: Path, document: Any, line: int | None = None) -> None:
    """Raise InputError if an object of a run's file has another form than commands read.

    Parameters
    ----------
    path : path of the file; files without an entry in ``FORMS`` are not checked
    document : parsed object
    line : number of its line, from 1, in a file of JSON Lines
    """
    if (form := FORMS.get(path.name)) is not None:
        where = str(path) if line is None else f"{path}: line {line}"
        require_form(form, document, where, "restore the file from a backup")
