"""Site policy and other settings of a node, validated on the node.

A site's owner passes them to the SuperNode as its configuration.
Covers: the owner defines here what a run may use (files, fields, methods, sizes, the minimum amount
of data behind an answer). The settings of a run cannot change it. No key declares a node to be
simulated: the program detects it (``client_app.simulation``), and in doubt a node counts as real.
Does not cover: a program that ignores the policy. These settings are read by the program that the
run's submitter sends.
"""

import os
import re
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator

from espalier.errors import EspalierError, InputError
from espalier.settings.combinations import MAX_SUM_CLIENTS
from espalier.settings.registry import METHODS
from espalier.settings.table import Columns, Table, mistake_lines
from espalier.settings.tables.task import known_task

MIN_TOKENS = 2048
"""Default minimum of tokens on which an answer rests: the calibration samples of a default run."""

MIN_THREADS = 8
"""Maximum of a run's threads on a machine with fewer processors."""

MOST = {
    "max_steps": 10_000,
    "max_batch_tokens": 262_144,
    "max_samples": 4096,
    "max_rounds": 1000,
    "max_runs": 100,
}
"""Default limits of a site whose owner sets none."""

SHOWN_PATH = 200
"""Maximum number of characters of an unusable path in an error."""

MAX_PATH = 4096
LONGEST_BELOW = 512
"""Maximum bytes of a path on Linux, and bytes reserved below a state directory.

The reserved bytes are for the names of run, site, round and blob.
"""


SITE_NAME = r"^[A-Za-z0-9._-]*$"
MAX_NAME = 64
"""Pattern and maximum length of a site's name."""


FLOWER_KEYS = ("partition-id", "num-partitions")
"""Keys of the configuration that Flower sets in a simulation; they are not settings."""


class NodeSettings(Table):
    """Keys of ``flower-supernode --node-config``; all are optional."""

    site: str = Field(
        "",
        max_length=MAX_NAME,
        pattern=SITE_NAME,
        description="Name of the site; clients are numbered in the order of names.",
    )
    site_key: str = Field(
        "",
        description=(
            "Path of the site's private key, with which it proves its name in runs whose server"
            " has the sites' public keys (`site-keys`). It may be the key of"
            " `--auth-supernode-private-key`. Only the site's account may read it."
        ),
    )
    require_site_keys: bool = Field(
        False,
        description=(
            "Take part only in runs whose server has the sites' public keys (`site-keys`), so that"
            " no other node can claim the site's name there."
        ),
    )
    peer_keys: str = Field(
        "",
        description=(
            "Directory at the site with the public keys of the other sites, `NAME.key.pub`, as"
            " `espalier keys` writes them. In a run with `federation.secure-sum` the site then"
            " masks its tensors only together with sites whose keys are there, so that the server"
            " cannot put itself between two sites. The files must come from the sites themselves"
            " and not from the server."
        ),
    )
    min_secure_sum: int = Field(
        0,
        ge=0,
        le=MAX_SUM_CLIENTS,
        description=(
            "Minimum number of sites in a secure sum. A run without `federation.secure-sum`, with"
            " fewer sites, with several rounds of fedspallm (except by magnitude), or with"
            " `evaluation.local-baseline`, whose losses would leave the site without a sum, is"
            " refused, and so is a sum of the same tensors with other sites than in an earlier one."
            " 0: no minimum, and all of this is allowed."
        ),
    )
    data_path: str = Field(
        "",
        description=(
            "File, directory or pattern (`notes/*.parquet`) with the site's own text, or with its"
            " records of a task, used whole. The ending of a file's name gives its format:"
            " `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`; other files are text, and"
            " may be compressed (`.gz`, `.zst`). Without it the site has only Python's"
            " documentation and code; a run cannot open files here by name."
        ),
    )
    data_field: str = Field("", description="Field of a record that holds the text; empty: `text`.")
    data_columns: Columns = Field(
        "",
        description=(
            "Fields of the site's records that have other names than the task's, as `needed=there`"
            " pairs: `instruction=question,response=answer`."
        ),
    )
    data_group: str = Field(
        "",
        description=(
            "Field whose value joins records that belong together, such as a patient: a group is"
            " used for training or held out as a whole."
        ),
    )
    data_task: str = Field(
        "",
        description=(
            "Task whose records `data-path` holds, for instance `sst2`; a run of another task, or"
            " of text, is refused. Empty: the file holds text, and a run of a task is refused."
        ),
    )
    model_path: str = Field(
        "",
        description=(
            "Directory of the base model at this site, which must have the same hash as the"
            " server's; empty: the demo model, whatever the run names (see `models`)."
        ),
    )
    models: Literal["", "hub"] = Field(
        "",
        description=(
            "`hub`: without `model-path` the site downloads the model of the Hugging Face hub that"
            " a run names (`model=owner/name`), with the node's own `HF_TOKEN` and `HF_HOME`; the"
            " same hash as the server's is required. Their size is not limited. Empty: a run cannot"
            " make the site download."
        ),
    )
    state_dir: str = Field(
        "",
        description=(
            "Directory of private state, of the egress log, and of the hashes and positions of the"
            " passages of a large text file; empty: `ESPALIER_STATE_DIR`, or `~/.espalier`."
        ),
    )
    num_samples: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description=(
            "Number of calibration samples of this site, if it has more or less text than others;"
            " 0: the run's `data.num-samples`."
        ),
    )
    own_text: bool = Field(
        False,
        description=(
            "Allow runs to evaluate on the site's held-out text or items (`evaluation.own-text`)."
            " A server that chooses models and numbers of items can compute differences of means;"
            " allow it only to a server that you trust with counts of tokens and classes."
        ),
    )
    min_tokens: int = Field(
        0,
        ge=0,
        description=(
            "Minimum number of tokens behind an answer of the site: those of its calibration"
            " samples, or of the sequences of a round's training; 0: 2048, in a simulation 1."
        ),
    )
    min_groups: int = Field(
        0,
        ge=0,
        description=(
            "Minimum number of groups of `data-group`, such as patients, behind an answer of the"
            " site: groups in its data, in its calibration samples, and in the sequences of a"
            " round's training. Needs `data-group`. 0: no minimum; not in a simulation."
        ),
    )
    allowed_methods: str = Field(
        "", description="Methods that runs may use, comma-separated; empty: all."
    )
    max_steps: int = Field(
        0,
        ge=0,
        description=(
            "Maximum number of training steps in a round, times accumulation; 0: 10000. In a"
            " simulation 0 means no limit, as for the next four keys."
        ),
    )
    max_batch_tokens: int = Field(
        0,
        ge=0,
        description=(
            "Maximum number of tokens in a batch, a forward pass of training: sequences times"
            " their length; 0: 262144."
        ),
    )
    max_samples: int = Field(
        0,
        ge=0,
        description=(
            "Maximum number of calibration samples that a run may ask for, and of samples of its"
            " evaluation texts; 0: 4096."
        ),
    )
    max_rounds: int = Field(
        0,
        ge=0,
        description=(
            "Maximum number of rounds of a run, including those that fedspallm adds if layers are"
            " left; 0: 1000."
        ),
    )
    max_runs: int = Field(
        0,
        ge=0,
        description=(
            "Maximum number of runs within `keep-days` that are answered; 0: 100. A run counts"
            " from the site's check of its data on, even if the check fails."
        ),
    )
    max_epsilon: float = Field(
        0.0,
        ge=0,
        le=1000,
        description=(
            "Privacy budget: maximum epsilon of all answers of this site together, in all runs, for"
            " every record, or group of `data-group`. Only differentially private runs are then"
            " answered, until it is spent. What was spent stays in `<state-dir>/privacy`. 0: no"
            " budget; private runs are noted there all the same."
        ),
    )
    delta: float = Field(
        1e-5,
        ge=1e-10,  # below, the accountant's rounding counts
        le=0.01,
        description=(
            "Delta at which `max-epsilon` holds; clearly below 1 divided by the number of records"
            " or groups."
        ),
    )
    max_honest_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "Maximum `privacy.honest-fraction` of runs in which this site adds a share of the noise"
            " and relies on that fraction of the sites for the rest. Needs `peer-keys`. 0: this"
            " site relies on nobody and refuses such runs; not in a simulation."
        ),
    )
    max_model_bytes: int = Field(
        0,
        ge=0,
        description=(
            "Maximum number of bytes of all models together that runs may send to this site, for"
            " methods whose clients need no base model (fedsoda); an offered model counts before it"
            " arrives. 0: no model is accepted, in a simulation no limit."
        ),
    )
    pruning_ratio: float = Field(
        0.0,
        ge=0,
        le=0.95,
        description=(
            "Pruning ratio of this site's own model (sft-p), which never leaves the site; 0: the"
            " run's `pruning.ratio`."
        ),
    )
    models_dir: str = Field(
        "",
        description=(
            "Directory for models that runs leave only at this site (sft-p and fedspine), in a"
            " folder `<run>-<site>` for each run; empty: none is written."
        ),
    )
    capability: float = Field(
        1.0,
        ge=0,
        le=1e9,
        description=(
            "Compute capability of this site relative to others, for FedSpaLLM's layer sampling"
            " and HetLoRA's ranks. 0: measured at enrolment; the run then does not repeat bit by"
            " bit."
        ),
    )
    require_approval: Literal["", "tensors", "all"] = Field(
        "",
        description=(
            "Replies that wait in the state directory for approval (`espalier approve`):"
            " `tensors`, those that contain tensors; `all`, also those with numbers (evaluations,"
            " times). Empty: none. Not in a simulation."
        ),
    )
    keep_days: int = Field(
        30, ge=1, description="Days after which unused private state is removed."
    )
    device: Literal["", "auto", "cpu", "cuda"] = Field(
        "", description="Device of this site; empty: as the run says."
    )
    device_map: Literal["one", "auto"] = Field(
        "one",
        description=(
            "`auto`: a model that is tuned is spread over all CUDA devices of this site, whole"
            " blocks at a time."
        ),
    )
    attention: Literal["", "sdpa", "flash_attention_2", "eager"] = Field(
        "", description="Implementation of attention at this site; empty: as the run says."
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description=(
            "CPU threads of this site; 0: as the run says, at most one per processor, or 8."
        ),
    )
    activations: Literal["", "memory", "disk"] = Field(
        "", description="Storage of hidden states at this site; empty: as the run says."
    )
    keep_model: bool = Field(
        True,
        description=(
            "Keep the model that was trained last in memory, on its device, and the token ids that"
            " it was trained on, for the next message, in a process that stays (`espalier node`, a"
            " simulation's worker)."
        ),
    )

    _simulated: bool = PrivateAttr(False)

    @field_validator("data_task")
    @classmethod
    def _is_a_task(cls, value: str) -> str:
        return value and known_task(value)

    @field_validator("allowed_methods")
    @classmethod
    def _are_methods(cls, value: str) -> str:
        if unknown := sorted(
            {part.strip() for part in value.split(",") if part.strip()} - METHODS.keys()
        ):
            shown = ", ".join(name.encode("ascii", "replace").decode() for name in unknown)
            raise ValueError(f"{shown} is not a method; choose one of {', '.join(METHODS)}")
        return value

    @property
    def simulated(self) -> bool:
        """True if this is a simulated node, whose data the run's settings name."""
        return self._simulated

    def state_root(self) -> Path:
        """Return the directory of the site's private state.

        Raises InputError if the path names the home of an unknown user, or is too long for the
        paths below it.
        """
        path = self.state_dir or os.environ.get("ESPALIER_STATE_DIR") or "~/.espalier"
        key = "state-dir" if self.state_dir else "ESPALIER_STATE_DIR"
        try:
            root = Path(path).expanduser()
        except RuntimeError as error:
            raise InputError(
                f"{key} = {shortened(path)!r}: {error}; name another directory"
            ) from None
        if (length := len(os.fsencode(root))) > MAX_PATH - LONGEST_BELOW:
            raise InputError(
                f"{key} = {shortened(path)!r}: is {length} bytes long, and paths below it would be"
                " too long for this system; name a directory of at most"
                f" {MAX_PATH - LONGEST_BELOW}"
            )
        return root

    def allows_own_text(self) -> bool:
        """Return whether a run may evaluate on the site's held-out text.

        The owner allows it, or the node is simulated.
        """
        return self.own_text or self.simulated

    def allows_method(self, method: str) -> bool:
        """Return whether a run may use a method at this site."""
        return not self.allowed_methods.strip() or method in {
            part.strip() for part in self.allowed_methods.split(",")
        }

    def fewest_tokens(self) -> int:
        """Return the minimum number of tokens behind an answer; 1 at a simulated site."""
        return self.min_tokens or (1 if self.simulated else MIN_TOKENS)

    def fewest_groups(self) -> int:
        """Return the minimum number of groups behind an answer; 0 at a simulated site."""
        return 0 if self.simulated else self.min_groups

    def max_bytes_of_models(self) -> int | None:
        """Return the maximum number of bytes of downloaded models; None means no limit.

        The default is 0 at a real site.
        """
        return None if self.simulated and not self.max_model_bytes else self.max_model_bytes

    def most(self, limit: str) -> int | None:
        """Return a limit of the site policy, such as ``max_steps``; None means no limit.

        It is the owner's value or the default; a simulated site has a limit only if its
        configuration names one.
        """
        if given := int(getattr(self, limit)):
            return given
        if self.simulated:
            return None
        return MOST[limit]

    def max_threads(self) -> int | None:
        """Return the maximum number of threads that a run may ask for; None means no limit.

        It is one per processor, at least 8, unless the owner chose it or the node is simulated.
        """
        if self.threads or self.simulated:
            return None
        return max(MIN_THREADS, os.cpu_count() or 1)


def simulated_node(**values: Any) -> NodeSettings:
    """Return the settings of a simulated node, whose data the run's settings name."""
    settings = NodeSettings(**values)
    settings._simulated = True
    return settings


def parse_node(config: Mapping[str, Any], *, simulated: bool = False) -> NodeSettings:
    """Parse a node configuration.

    Parameters
    ----------
    config : keys and values of ``--node-config``
    simulated : whether the node is simulated; the caller must know, because no key declares it

    Raises
    ------
    InputError
        The message has one line per wrong key or value.
    """
    mistakes = list[str]()
    try:
        values = {key: value for key, value in config.items() if key not in FLOWER_KEYS}
        if not values.get("site"):
            # Flower numbers the nodes of a simulation.
            values["site"] = claimed_name(config)
        settings = NodeSettings.model_validate(values)
        settings._simulated = simulated
    except ValidationError as error:
        mistakes += mistake_lines(
            error, [field.alias or name for name, field in NodeSettings.model_fields.items()]
        )
    for key in ("site-key", "data-path", "model-path", "state-dir", "models-dir"):
        path = config.get(key)
        if (
            isinstance(path, str)
            and path
            and (why := _unusable(path, missing=key in ("state-dir", "models-dir")))
            and not (key == "data-path" and _matches_files(path))
        ):
            mistakes.append(
                f"{key} = {shortened(path)!r}: {why} on this node; name a file or directory that it"
                " can read"
            )
    if simulated and config.get("require-approval"):
        mistakes.append(
            "require-approval: nobody can approve replies of a simulated node; leave it out"
        )
    if not mistakes and settings.min_groups and not (settings.data_path and settings.data_group):
        mistakes.append(
            f"min-groups = {settings.min_groups}: needs data-path and data-group, the field that"
            " names a record's group; set both, or leave min-groups out"
        )
    if not mistakes:
        try:
            settings.state_root()
        except EspalierError as mistake:
            mistakes.append(str(mistake))
    if config.get("site") in (".", ".."):
        mistakes.append(
            f"site = {config['site']!r}: is not a file name; give the site another name"
        )
    if not config.get("site") and not claimed_name(config):
        mistakes.append(
            "site: give the node a name, for instance --node-config 'site=\"hospital-a\"'"
        )
    if mistakes:
        # Errors travel to the server, but the value of ``pruning-ratio`` must not leave the site.
        outward = [OF_A_SECRET if line.startswith("pruning-ratio") else line for line in mistakes]
        raise InputError(_wrong(mistakes), _wrong(outward))
    return settings


OF_A_SECRET = "pruning-ratio: has an invalid value; this node's log says which"
"""Error text for others about a key whose value never leaves a site."""


def _wrong(lines: Sequence[str]) -> str:
    return "the node's configuration is wrong:\n" + "\n".join(f"  {line}" for line in lines)


def shortened(path: str) -> str:
    """Return a path for an error message, shortened to ``SHOWN_PATH`` characters."""
    return path if len(path) <= SHOWN_PATH else path[:SHOWN_PATH] + "..."


def is_site_name(name: object) -> bool:
    """Return whether a value is a site name, which is also the name of a file."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and len(name) <= MAX_NAME
        and re.fullmatch(SITE_NAME, name) is not None
    )


def claimed_name(config: Mapping[str, Any]) -> str:
    """Return the site name of a node configuration; empty if it has none.

    The rest of the configuration may be invalid.
    """
    site = config.get("site")
    partition = config.get("partition-id", -1)
    if site:
        return str(site) if is_site_name(site) else ""
    return f"node-{partition:05d}" if type(partition) is int and 0 <= partition < 10**9 else ""


def _matches_files(pattern: str) -> bool:
    """Return whether a path is a pattern, such as ``notes/*.parquet``, that matches a file."""
    return has_magic(pattern) and bool(glob(os.path.expanduser(pattern), recursive=True))


def _unusable(path: str, *, missing: bool) -> str:
    """Return why a path cannot be used, or an empty text.

    With ``missing`` the file need not exist yet. Whether the file can be opened is not checked.
    """
    try:
        os.stat(Path(path).expanduser())
    except (FileNotFoundError, NotADirectoryError):
        return "" if missing else "does not exist"
    except (OSError, RuntimeError, ValueError) as error:
        # The path is too long or forbidden, names another user's home or contains an invalid byte.
        return f"is not a path ({getattr(error, 'strerror', None) or error})"
    return ""
