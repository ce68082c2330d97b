"""A site as one message finds it: its settings, base model, computing and private state."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flwr.app import Context

from client_app.simulated import in_simulation
from espalier.modeling.downloaded import open_downloaded
from espalier.modeling.opened import OpenedModel, open_model
from espalier.settings.mistakes import Mistake
from espalier.settings.node import NodeSettings, parse_node, site_id
from espalier.settings.run import RunSettings, parse
from espalier.storage.private import PrivateState, private_folder
from espalier.wire.code_hash import code_sha256
from espalier.wire.messages import Header, Letter, Scalars

DEMO = "demo"
"""The model that is installed with Espalier."""

if TYPE_CHECKING:
    from espalier.modeling.computing import Computing
    from espalier.training.adapted import Loader


@dataclass
class Site:
    """Everything that a handler needs, opened at first use."""

    settings: RunSettings
    node: NodeSettings
    header: Header | None = None
    """Of the message that it answers; None where there is none."""
    node_id: int = 0
    """Flower's id of the node that it answers from."""

    @staticmethod
    def of(context: Context, header: Header | None = None) -> "Site":
        """Read the run's and the node's settings, to answer a message with this header.

        Raises
        ------
        Mistake
            A setting is wrong.
        """
        node = parse_node(context.node_config, simulated=in_simulation())
        try:
            settings = parse(context.run_config)
        except Mistake as mistake:
            program = code_sha256()[:12]
            raise Mistake(
                f"{mistake}\n  (this node runs program {program}; the server may run another:"
                " install its release here)"
            ) from None
        return Site(settings, node, header, context.node_id)

    @cached_property
    def model(self) -> OpenedModel:
        """The base model at this site: the one that its owner names, else the demo; in a simulation the run's.

        Where clients need none, it is the model that the run's server brought.

        Raises
        ------
        Mistake
            The run names one, and this site none; or it cannot be opened.
        StateLost
            The server has not brought it yet, or it is damaged.
        """
        if not self.settings.job.NEEDS_BASE_MODEL:
            from client_app.downloaded_model import downloaded_model

            assert self.header is not None
            folder = downloaded_model(self, self.state(self.header))
            # Of this machine's own server.
            return open_model(str(folder)) if self.node.simulated else open_downloaded(folder)
        if not (self.node.simulated or self.node.model_path or self.settings.model == DEMO):
            raise Mistake(
                "model-path: this site names no base model of its own, and opens none that a run"
                f" names (model = {self.settings.model!r}); give the site its copy, with model-path"
                " in --node-config"
            )
        if not self.node.model_path:
            return open_model(self.settings.model)
        try:
            return open_model(self.node.model_path)
        except Mistake as mistake:
            raise Mistake(f"model-path in --node-config: {mistake}") from None

    @cached_property
    def computing(self) -> "Computing":
        """Device, dtype and threads, applied to this process."""
        from espalier.modeling.computing import set_up

        return set_up(self.settings, private_folder(self.node.state_root()), self.node)

    @property
    def load(self) -> "Loader":
        """How a whole model comes into memory: the last one stays there, unless its owner wants otherwise."""
        from espalier.training.adapted import AdaptedModel
        from espalier.training.kept_model import kept_model

        return kept_model if self.node.keep_model else AdaptedModel.load

    @property
    def name(self) -> str:
        """Name under which the site takes part."""
        return site_id(self.node)

    def state(self, header: Header) -> PrivateState:
        """The private state of this site in the run that a message is of."""
        client: dict[str, str | int] = {"set of settings": self.settings.digest()}
        if header.kind != "enrol":  # a number comes with a seat
            client = {"number": header.client, **client}
        return PrivateState(self.node.state_root(), header.lineage, self.name, client)


def reply_to(request: Letter, scalars: Scalars, blobs: dict[str, bytes] | None = None) -> Letter:
    """A letter that answers a request."""
    return Letter(request.header.model_copy(), scalars.model_dump(), blobs or {})
