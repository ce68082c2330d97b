"""Clients with texts of one kind, and their replies, computed by the app's own handlers."""

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from client_app.app import app
from espalier.data.builtin.built_in_texts import BUILT_IN, own_passages
from espalier.data.client_text import client_samples, training_samples
from espalier.data.passages import passages, split
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.identity.names import lineage_of
from espalier.messages.message import Kind, MessageBody, request_header
from espalier.messages.records import address, read
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from tests.in_process import InProcessGrid

SECONDS = 600.0
"""Seconds until a request expires."""


@dataclass(frozen=True)
class Ask:
    """Request to a client."""

    kind: Kind
    fields: Mapping[str, Any]
    server_round: int = 1
    blobs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Clients:
    """Clients whose texts come from one text, so that they differ only in their passages.

    Parameters
    ----------
    model : directory of a model, or ``demo``
    source : name of a built-in text
    folder : directory of the clients' texts and states
    number : number of clients
    samples : number of samples of each client
    tokens : number of tokens in a sample
    """

    model: str
    source: str
    folder: Path
    number: int
    samples: int
    tokens: int
    seed: int = 0
    file: Path | None = None
    """Text file whose passages are dealt in place of the built-in text."""

    @cached_property
    def opened(self) -> OpenedModel:
        """Base model, which the server has too."""
        return open_model(self.model)

    def deal(self) -> None:
        """Write each client's text: random passages for exactly the wanted number of samples.

        Raises
        ------
        InputError
            The text has too few passages.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self._passages()
        random.Random(self.seed).shuffle(found)
        left = iter(found)
        for client in range(self.number):
            own: list[str] = []
            while (have := self._num_samples(own)) < self.samples:
                if (passage := next(left, None)) is None:
                    raise InputError(
                        f"--clients {self.number}: the text is enough for {client}; ask for fewer,"
                        " or fewer --samples"
                    )
                if self._num_samples([*own, passage]) <= max(self.samples, have):
                    own.append(passage)
            lines = "".join(json.dumps({"text": passage}) + "\n" for passage in own)
            (self.folder / f"{client}.jsonl").write_text(lines)

    def _passages(self) -> list[str]:
        if self.file is not None:
            try:
                return list(passages(self.file.read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"--text {self.file}: cannot be read ({error})") from None
        sources = len(BUILT_IN[self.source].SOURCES)
        return [
            passage
            for source in range(sources)
            for passage in own_passages(self.source, source, sources)
        ]

    def _num_samples(self, texts: list[str]) -> int:
        """Return the number of samples in the passages that are not held out."""
        own, _ = split(texts)
        return len(self.opened.encode("\n\n".join(own))) // self.tokens

    def settings(self, method: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flat settings of a run of a method with these clients."""
        return {
            "model": self.model,
            "num-clients": self.number,
            "seed": self.seed,
            "threads": 1,
            "data.source": "files",
            "data.path": str(self.folder / "{client}.jsonl"),
            "data.sequence-length": self.tokens,
            **({} if "training.steps" in method else {"data.num-samples": self.samples}),
            **method,
        }

    def known(self, run: RunSettings, client: int) -> Tensor:
        """Return the samples that a client's reply uses: (samples, tokens), int64."""
        own = training_samples if run.tunes else client_samples
        return own(run, simulated_node(), self.opened.encode, client)

    def replies(
        self,
        method: Mapping[str, Any],
        fields: Mapping[str, Any],
        asked: Sequence[int] | None = None,
    ) -> list[MessageBody]:
        """Return the reply of the asked clients, by default all, to the first round's request.

        Raises
        ------
        InputError
            A client refuses.
        """
        ask = [Ask("train", dict(fields))]
        return [reply for (reply,) in self.exchanges(method, ask, asked)]

    def exchanges(
        self,
        method: Mapping[str, Any],
        requests: Sequence[Ask],
        asked: Sequence[int] | None = None,
    ) -> Iterator[list[MessageBody]]:
        """Yield each asked client's replies to requests that are sent one after the other.

        Raises
        ------
        InputError
            A client refuses.
        """
        settings = self.settings(method)
        run = parse(settings)
        # A client answers a round of a run once, so runs with other settings have another state.
        os.environ["ESPALIER_STATE_DIR"] = str(self.folder / "state" / run.digest()[:16])
        nodes = [
            {"partition-id": client, "num-partitions": self.number} for client in range(self.number)
        ]
        grid = InProcessGrid(app, nodes, settings)
        lineage = lineage_of("20260101-000000", run.method)
        nodes_of_clients = grid.get_node_ids()
        for client in range(self.number) if asked is None else asked:
            found = []
            for one in requests:
                header = request_header(
                    run.method, one.kind, one.server_round, client, lineage=lineage
                )
                message = MessageBody(header, dict(one.fields), dict(one.blobs))
                (sent,) = grid.push_messages([address(message, nodes_of_clients[client], SECONDS)])
                (reply,) = grid.pull_messages([sent])
                body = read(reply.content)
                if body.header.status != "ok":
                    reason = body.fields.get("reason", "did not answer")
                    raise InputError(f"client {client}: {reason}")
                found.append(body)
            yield found
