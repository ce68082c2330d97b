"""Which layers of the global model each client of FedSpaLLM holds, and the messages that bring it those that it will read."""

from collections.abc import Iterator, Mapping

from flwr.app import Message

from espalier.wire.fedspallm import Update
from espalier.wire.payload import block_key
from espalier.wire.plan import cut_into_parts
from strategies.engine.rounds import Rounds
from strategies.results.kept import KeptResult, Layers


class HeldLayers:
    """The version of every layer at every client; at first all clients hold the dense model.

    Parameters
    ----------
    result : the global model, and where its layers are kept
    part_bytes : largest payload of one message
    """

    def __init__(self, result: KeptResult, part_bytes: int) -> None:
        self.result = result
        self.part_bytes = part_bytes
        self._versions: dict[int, list[int]] = {}

    def state(self) -> dict[str, list[int]]:
        """Versions by client, for a checkpoint."""
        return {str(client): versions for client, versions in sorted(self._versions.items())}

    def restore(self, state: dict[str, list[int]]) -> None:
        """Take over what ``state`` returned."""
        self._versions = {int(client): versions for client, versions in state.items()}

    def forget(self, client: int) -> None:
        """A client lost what it held, and has the dense model again."""
        self._versions.pop(client, None)

    def stale(self, client: int, model: Layers) -> list[int]:
        """Layers of which a client holds another version than a model has."""
        held = self._held(client)
        return [index for index, version in enumerate(model.versions) if version != held[index]]

    def updates(
        self,
        rounds: Rounds,
        server_round: int,
        model: Layers,
        ends: Mapping[int, int] | None = None,
    ) -> Iterator[list[Message]]:
        """Messages that bring every active client its stale layers of a model, part by part.

        Clients that get the same part are asked together, and their messages share its blobs, so that memory holds one part
        at a time whatever the number of clients.

        Parameters
        ----------
        ends : client -> number of layers; a client is brought none from there on, since it will not read them. None: all
        """
        stale = {seat.client: self.stale(seat.client, model) for seat in rounds.roster.active()}
        if ends is not None:
            stale = {
                client: [index for index in stale[client] if index < end]
                for client, end in ends.items()
                if client in stale
            }
        parts = {client: self._cut(model, blocks) for client, blocks in stale.items() if blocks}
        for part in range(max(map(len, parts.values()), default=0)):
            wanted = {client: tuple(cut[part]) for client, cut in parts.items() if part < len(cut)}
            for blocks in sorted(set(wanted.values())):
                clients = {client for client in wanted if wanted[client] == blocks}
                yield self._messages(rounds, clients, server_round, model, list(blocks), part)
        for client in parts:
            held = self._held(client)
            self._versions[client] = [
                model.versions[index] if index in stale[client] else held[index]
                for index in range(len(held))
            ]

    def _held(self, client: int) -> list[int]:
        return self._versions.get(client, [0] * len(self.result.versions))

    def _cut(self, model: Layers, blocks: list[int]) -> list[list[int]]:
        sizes = [self.result.num_bytes(index, model.num_kept[index]) for index in blocks]
        return [
            [blocks[place] for place in part] for part in cut_into_parts(sizes, self.part_bytes)
        ]

    def _messages(
        self,
        rounds: Rounds,
        clients: set[int],
        server_round: int,
        model: Layers,
        blocks: list[int],
        part: int,
    ) -> list[Message]:
        update = Update(
            blocks=blocks,
            versions=[model.versions[index] for index in blocks],
            num_kept=[number for index in blocks for number in model.num_kept[index]],
        )
        blobs = {block_key(index): self.result.store.get(model.blobs[index]) for index in blocks}
        seats = [seat for seat in rounds.roster.active() if seat.client in clients]
        return [
            rounds.request("deliver", seat, server_round, update, blobs, part) for seat in seats
        ]
