"""Site as seen by one message: settings, contract, base model, device and client state.

Each of these is read once per message, however many steps need it.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context

from client_app.model_folder import downloaded_model
from client_app.simulation import in_simulation
from espalier.data.data_protection import require_groups
from espalier.environment.hub_models import cached_model, download_model, hub_name
from espalier.environment.paths import DEMO
from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.tokenizer.downloaded_model import open_downloaded
from espalier.identity.code_hash import code_sha256
from espalier.messages.contract import Contract
from espalier.messages.contracts import contract_for, plain_contract
from espalier.messages.message import Fields, Header, MessageBody
from espalier.settings.node import NodeSettings, parse_node
from espalier.settings.run import RunSettings, parse
from espalier.storage.client_state import PrivateState, private_folder

if TYPE_CHECKING:
    import numpy as np

    from espalier.hf.machine.computing import Computing
    from espalier.training.adapted_model import Loader

HUB_MODEL = "hub-model"
"""Name of the document with the commit of the run's model of the hub."""


@dataclass
class Site:
    """Settings, contract, model, device and client state for a message, opened at first use."""

    run_config: Mapping[str, Any]
    """Flat settings of the run, with dotted keys."""
    node: NodeSettings
    request: MessageBody | None = None
    """Request that is answered; None if there is no message."""
    node_id: int = 0
    """Flower's id of the node that answers."""

    @staticmethod
    def of(context: Context, request: MessageBody | None = None) -> "Site":
        """Read the settings of the node, to answer a request."""
        # The kind of process decides, whatever the configuration says.
        node = parse_node(context.node_config, simulated=in_simulation())
        return Site(context.run_config, node, request, context.node_id)

    @cached_property
    def settings(self) -> RunSettings:
        """Settings of the run; InputError if one is invalid."""
        try:
            return parse(self.run_config)
        except EspalierError as error:
            program = code_sha256()[:12]
            raise InputError(
                f"{error}\n  (this node runs program {program}; if the server runs another"
                " one, install the server's release here)"
            ) from None

    @cached_property
    def contract(self) -> Contract:
        """Contract of the request and its reply; ProtocolError if there is no such request."""
        assert self.request is not None
        return contract_for(self.request, lambda: self.model.plan, self.settings)

    def with_plain_contract(self, request: MessageBody) -> "Site":
        """Return this site as the handler of a request sees it whose tensors stay here.

        What this site has opened is shared.
        """
        # ``copy`` shares what was opened; request and contract are its own.
        site = copy(self)
        site.request = request
        site.contract = plain_contract(request, lambda: self.model.plan, self.settings)
        return site

    @cached_property
    def model(self) -> OpenedModel:
        """Base model at this site.

        It is the model that the site's owner configured, or the demo model if there is none, or the
        run's model of the Hugging Face hub if the owner allows it. In a simulation it is the run's
        model. If clients of the method need no base model, it is the model that the server pushed;
        StateLost if that is missing or damaged.
        """
        if not self.settings.job.NEEDS_BASE_MODEL:
            assert self.request is not None
            folder = downloaded_model(self.node.state_root(), self.state(self.request.header))
            # In a simulation the model comes from this machine's own server and needs no checks.
            return open_model(str(folder)) if self.node.simulated else open_downloaded(folder)
        # The owner's model has precedence over everything that a run names.
        if self.node.model_path:
            try:
                return open_model(self.node.model_path)
            except EspalierError as error:
                raise InputError(f"model-path in --node-config: {error}") from None
        # The demo model is part of the program.
        if self.node.simulated or self.settings.model == DEMO:
            return open_model(self.settings.model)
        # A directory of this name at the site is never opened.
        if self.node.models == "hub" and hub_name(self.settings.model):
            return open_downloaded(self._hub_directory())
        raise InputError(
            "model-path: this site names no base model, and does not open models that a run names"
            f" (model = {self.settings.model!r}); set model-path in --node-config, or models=hub"
            " for models of the Hugging Face hub"
        )

    def _hub_directory(self) -> Path:
        """Return the directory of the run's model of the hub; enrolment downloads it.

        The run's later messages use the same commit, whatever the hub has then.
        """
        name = self.settings.model
        state = self.state(self.request.header) if self.request else None
        # The commit was fixed at enrolment.
        if state and (pinned := state.load_lasting(HUB_MODEL)):
            name = pinned["model"]
        try:
            # Only enrolment goes to the hub; later messages must find the model in the cache.
            if self.request is None or self.request.header.kind == "enrol":
                name = download_model(name)
                if state:
                    state.save_lasting(HUB_MODEL, {"model": name})
            return cached_model(name)
        except EspalierError as error:
            setting = f"model = {self.settings.model!r}: this site could not get it from the hub"
            # Errors of the hub may contain paths or tokens, so they stay here.
            raise InputError(str(error), f"{setting}; the node's log gives the reason") from None

    @cached_property
    def computing(self) -> "Computing":
        """Device, dtype and threads, already applied to this process."""
        from espalier.hf.machine.computing import set_up

        return set_up(self.settings, private_folder(self.node.state_root()), self.node)

    def require_groups_of(self, numbers: Iterable[int], remedy: str) -> None:
        """Raise InputError if these sequences or samples are from too few groups (``min-groups``).

        Parameters
        ----------
        numbers : numbers of training sequences or, for methods that do not tune, of calibration
            samples
        """
        if self.node.fewest_groups():
            require_groups(self.node, (self._groups[number] for number in numbers), remedy)

    @cached_property
    def _groups(self) -> "list[set[int]] | np.ndarray":
        """Groups of ``data-group`` in each training sequence or calibration sample."""
        from espalier.data.client_text import sample_groups
        from espalier.training.sequences import sequence_groups

        assert self.request is not None
        client = self.request.header.client
        if self.settings.tunes:
            return sequence_groups(self.settings, self.node, self.model, client)
        return sample_groups(self.settings, self.node, self.model.encode, client, drawn=True)

    @property
    def load(self) -> "Loader":
        """Function that loads a whole model; by default the last one stays in memory."""
        from espalier.training.adapted_model import AdaptedModel
        from espalier.training.model_cache import kept_model

        return kept_model if self.node.keep_model else AdaptedModel.load

    @property
    def name(self) -> str:
        """Name of the site in runs."""
        return self.node.site

    def state(self, header: Header) -> PrivateState:
        """Return the client state of this site in the run of a message."""
        # A state of other settings must not be mixed with this run's.
        client: dict[str, str | int] = {"set of settings": self.settings.digest()}
        # A site gets its client number only after enrolment.
        if header.kind != "enrol":
            client = {"number": header.client, **client}
        return PrivateState(self.node.state_root(), header.lineage, self.name, client)


def reply_to(
    request: MessageBody, fields: Fields, blobs: dict[str, bytes] | None = None
) -> MessageBody:
    """Return a reply to a request with the given fields and blobs."""
    return MessageBody(request.header.model_copy(), fields.model_dump(), blobs or {})
