"""What belongs to a site: the configuration that its owner gives to the SuperNode, validated on the node."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from espalier.settings.mistakes import Mistake
from espalier.settings.table import Table, mistake_lines

LEAST_SAMPLES = 8
"""Sequences of a round's training at a site whose owner names no number."""


class NodeSettings(Table):
    """Keys of ``flower-supernode --node-config``; all are optional."""

    partition_id: int = Field(-1, ge=-1, description="Flower's partition id")
    num_partitions: int = Field(0, ge=0, description="Flower's number of partitions")
    site: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9._-]*$", description="name under which the site takes part")
    data_path: str = Field("", description="the site's own text or JSON Lines file")
    data_format: Literal["", "text", "jsonl"] = Field("", description="format of data-path; empty: by its ending")
    data_field: str = Field("", description="field of a JSON Lines record; empty: the run's data.field")
    model_path: str = Field("", description="directory of the base model at this site; empty: the run's model")
    state_dir: str = Field("", description="where private state is kept; empty: ESPALIER_STATE_DIR or ~/.espalier")
    windows: int = Field(0, ge=0, le=1_000_000, description="calibration windows of this site; 0: the run's data.windows")
    own_text: bool = Field(False, description="whether the run may evaluate on this site's held-out text or items")
    least_samples: int = Field(
        0, ge=0, description="fewest training sequences on which a round's update may rest; 0: 8, and 1 of a simulated site"
    )
    capability: float = Field(1.0, ge=0, le=1e9, description="how much this site can compute, beside others; 0: measure it")
    keep_days: int = Field(30, ge=1, description="private state that was not touched for so long is removed")
    device: Literal["", "auto", "cpu", "cuda"] = Field("", description="empty: the run's device")
    threads: int = Field(0, ge=0, description="CPU threads; 0: the run's threads")
    activations: Literal["", "memory", "disk"] = Field("", description="where hidden states are kept; empty: as the run says")

    def state_root(self) -> Path:
        """Directory of the site's private state."""
        return Path(self.state_dir or os.environ.get("ESPALIER_STATE_DIR") or "~/.espalier").expanduser()

    def allows_own_text(self) -> bool:
        """Whether a run may evaluate on the site's held-out text: if its owner says so, or the site is simulated."""
        return self.own_text or self.partition_id >= 0

    def fewest_samples(self) -> int:
        """Fewest training sequences of a round's update: as the owner says, else 8; a simulated site has nothing to hide."""
        return self.least_samples or (1 if self.partition_id >= 0 else LEAST_SAMPLES)

    def file_format(self) -> Literal["text", "jsonl"]:
        """Format of ``data_path``."""
        if self.data_format:
            return self.data_format
        return "jsonl" if self.data_path.endswith((".jsonl", ".json")) else "text"


def parse_node(config: Mapping[str, Any]) -> NodeSettings:
    """Read a node configuration.

    Raises
    ------
    Mistake
        With one line per wrong key or value, all of them at once.
    """
    mistakes = []
    try:
        settings = NodeSettings.model_validate(dict(config))
    except ValidationError as error:
        mistakes = mistake_lines(error, NodeSettings)
    for key in ("data-path", "model-path"):
        path = config.get(key)
        if isinstance(path, str) and path and not Path(path).expanduser().exists():
            mistakes.append(f"{key} = {path!r}: does not exist on this node; name a file or directory that it can read")
    if not config.get("site") and config.get("partition-id", -1) == -1:
        mistakes.append("site: give the node a name, for instance --node-config 'site=\"hospital-a\"'")
    if mistakes:
        raise Mistake("the node's configuration is wrong:\n" + "\n".join(f"  {line}" for line in mistakes))
    return settings


def site_id(settings: NodeSettings) -> str:
    """Name under which a node takes part: its ``site``, else one made of its partition id."""
    return settings.site or f"node-{settings.partition_id:05d}"
