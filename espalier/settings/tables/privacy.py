"""Settings of a run's differential privacy."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from espalier.settings.table import Table
from espalier.settings.tables.noise_share import NoiseShare

if TYPE_CHECKING:
    from espalier.settings.method import MethodSettings

MAX_EPSILON = 64.0
"""Maximum epsilon of a run; a larger one bounds nothing that a person would call privacy."""
MIN_RATE = 1e-6
"""Minimum sampling rate, apart from 0."""
DEFAULT_RATES = {"dp-sgd": 0.1, "sums": 1.0}
"""Sampling rate that 0 stands for, by mechanism."""
NO_MECHANISM = "no mechanism of differential privacy is built for its replies"
"""Reason for which a method refuses private runs, if its settings table names no other."""


class PrivacySettings(Table):
    """Table ``[privacy]``: differential privacy of the records or groups of each site."""

    epsilon: float = Field(
        0.0,
        ge=0,
        le=MAX_EPSILON,
        description=(
            "Differential privacy of every record (or group, with `data.group` or a site's"
            " `data-group`): all replies of a client in the run together are (epsilon,"
            " delta)-differentially private. Needs the extra `privacy`, and fedpetuning or"
            " pooled-pruning. 0: none."
        ),
    )
    delta: float = Field(
        1e-5,
        ge=1e-10,  # below, the accountant's rounding counts
        le=0.01,
        description=(
            "Delta of the guarantee. Choose it clearly below 1 divided by the number of records or"
            " groups of the largest site."
        ),
    )
    clip_norm: float = Field(
        1.0,
        ge=1e-6,
        le=1e6,
        description="Maximum L2 norm of the gradient of one record or group.",
    )
    sampling_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "Probability with which a record or group takes part in a step of training, or in the"
            " sums. It is the same at every site, so that no site reveals how many it has. 0: 0.1"
            " for training, 1 for sums."
        ),
    )
    max_sequences: int = Field(
        1,
        ge=1,
        le=1024,
        description=(
            "Maximum number of sequences of one record or group that are used at a time; further"
            " ones are left out at random."
        ),
    )
    noise: Literal["secure", "seed"] = Field(
        "secure",
        description=(
            "Source of noise and sampling. `secure`: the operating system of each site, so that a"
            " run does not repeat bit by bit. `seed`: the run's seed, only in a simulation; it"
            " repeats, and protects nothing, because everybody with the seed can"
            " subtract the noise."
        ),
    )

    honest_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "With `federation.secure-sum` the sites share the noise of the sums: together they add"
            " enough, if at least this fraction of them is honest. The guarantee then holds towards"
            " everybody who sees the sum only (docs/privacy/differential-privacy.md). 0: each site"
            " adds all noise that it needs, and relies on nobody."
        ),
    )

    @field_validator("sampling_rate")
    @classmethod
    def _takes_records(cls, value: float) -> float:
        if 0 < value < MIN_RATE:
            raise ValueError(f"no record would take part; write 0, or at least {MIN_RATE:g}")
        return value

    @property
    def on(self) -> bool:
        """True if the run is differentially private."""
        return self.epsilon > 0

    def rate(self, mechanism: str) -> float:
        """Return the sampling rate of a mechanism."""
        return self.sampling_rate or DEFAULT_RATES[mechanism]


def privacy_contradictions(
    method: str,
    job: "MethodSettings",
    tables: Mapping[str, Any],
    able: tuple[str, ...],
    num_clients: int,
) -> list[str]:
    """Return an error line for everything that does not go together with differential privacy.

    Parameters
    ----------
    job : the method's own table
    tables : validated tables by name
    able : names of the methods that have a mechanism
    """
    privacy: PrivacySettings = tables["privacy"]
    if not privacy.on:
        return []
    given = f"privacy.epsilon = {privacy.epsilon:g}"
    if not job.MECHANISM:
        return [
            f"{given}: method = '{method}' cannot keep it: {job.NO_MECHANISM}; choose method ="
            f" {' or '.join(map(repr, able))}, or set it to 0"
        ]
    lines = []
    evaluation = tables["evaluation"]
    if evaluation.local_baseline:
        lines.append(
            "evaluation.local-baseline = True: a client's losses of its local baseline would leave"
            f" it without noise; with {given} set it to false"
        )
    if evaluation.own_text:
        lines.append(
            "evaluation.own-text = True: losses on a client's own text would leave it without"
            f" noise; with {given} set it to false"
        )
    if privacy.honest_fraction:
        fault = _unshared(privacy.honest_fraction, job, tables, num_clients)
        setting = f"privacy.honest-fraction = {privacy.honest_fraction:g}"
        lines += [f"{setting}: {fault}"] if fault else []
    of_mechanism = _of_training if job.MECHANISM == "dp-sgd" else _of_sums
    return lines + [f"{line}; with {given} {remedy}" for line, remedy in of_mechanism(job, tables)]


def _unshared(
    fraction: float, job: "MethodSettings", tables: Mapping[str, Any], num_clients: int
) -> str:
    """Return why sites cannot share their noise, and the remedy; empty if they can."""
    own = "set it to 0, so that each site adds all of its own noise"
    if job.MECHANISM != "sums":
        return (
            "in training each site needs all noise in every step, because the next step follows"
            f" from it; {own}"
        )
    if not tables["federation"].secure_sum:
        return f"without federation.secure-sum the server sees each site's own sums; {own}"
    fault = NoiseShare(num_clients, fraction).fault
    return f"{fault}; raise it if more sites are honest, or {own}" if fault else ""


def _of_training(job: "MethodSettings", tables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what does not go together with DP-SGD, and the remedy."""
    training = tables["training"]
    sequences = tables["privacy"].max_sequences
    no_gradients = "True: gradients of single sequences cannot be had with it"
    # Whether a setting is wrong, the setting with the reason, and the remedy.
    checks = [
        (
            tables["federation"].client_weights == "samples",
            "federation.client-weights = 'samples': would tell each client's exact number of"
            " sequences",
            "set it to 'equal'",
        ),
        (
            tables["lora"].dropout,
            f"lora.dropout = {tables['lora'].dropout:g}: is drawn for all sequences of a pass"
            " together, so one record would change the gradients of others",
            "set it to 0",
        ),
        (
            training.proximal,
            f"training.proximal = {training.proximal:g}: refers to the mean gradient, which nobody"
            " may know",
            "set it to 0",
        ),
        (
            training.accumulation != 1,
            f"training.accumulation = {training.accumulation}: the number of sequences of a step is"
            " random, and batch-size only bounds a forward pass",
            "set it to 1",
        ),
        (
            training.gradient_checkpointing,
            f"training.gradient-checkpointing = {no_gradients}",
            "set it to false",
        ),
        (training.compile, f"training.compile = {no_gradients}", "set it to false"),
        (
            tables["task"].packing,
            "task.packing = True: would mix records in a sequence",
            "set it to false",
        ),
        (
            sequences > training.batch_size,
            f"privacy.max-sequences = {sequences}: is above training.batch-size ="
            f" {training.batch_size}, and a record or group passes at once",
            "raise training.batch-size",
        ),
    ]
    return [(line, remedy) for is_wrong, line, remedy in checks if is_wrong]


def _of_sums(job: Any, tables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what does not go together with noisy sums, and the remedy."""
    rule = tables["federation"].aggregation_rule
    checks = [
        (
            job.strategy != "one-shot",
            f"pruning.strategy = '{job.strategy}': its noise is not built",
            "set it to 'one-shot'",
        ),
        (
            rule != "mean",
            f"federation.aggregation-rule = '{rule}': compares means of clients, and private sums"
            " have no count",
            "set it to 'mean'",
        ),
    ]
    return [(line, remedy) for is_wrong, line, remedy in checks if is_wrong]


OF_TRAINING: tuple[str, ...] = ("clip-norm",)
"""Keys that only training reads."""


def unread_for_privacy(
    flat: Mapping[str, Any], mechanism: str, tuning: str
) -> dict[str, tuple[str, str]]:
    """Return the keys that a run does not read because it is, or is not, private.

    Parameters
    ----------
    flat : all values by dotted key
    mechanism : mechanism of the run's method
    tuning : words for the methods with DP-SGD
    """
    on = flat["privacy.epsilon"]
    names = (field.alias or name for name, field in PrivacySettings.model_fields.items())
    keys = [key for name in names if (key := f"privacy.{name}") in flat and name != "epsilon"]
    if not isinstance(on, (int, float)) or on <= 0:
        return dict.fromkeys(keys, ("privacy.epsilon", "privacy.epsilon above 0"))
    if mechanism != "sums":
        return {}
    found = {f"privacy.{key}": ("method", tuning) for key in OF_TRAINING}
    not_read = ("privacy.epsilon", "privacy.epsilon = 0")
    return found | dict.fromkeys(("data.num-samples", "pooled-pruning.weighting"), not_read)
