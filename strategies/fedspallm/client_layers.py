"""Versions of the global layers at each client of FedSpaLLM, and messages that push new ones."""

from collections.abc import Mapping

from flwr.app import Message

from espalier.methods.fedspallm import Update
from espalier.models.plan import block_key, cut_into_parts
from strategies.base.rounds import Rounds
from strategies.fedspallm.global_model import KeptResult, Layers


class HeldLayers:
    """Version of every layer at every client; at first all clients have the dense model.

    Parameters
    ----------
    result : global model and the store of its layers
    part_bytes : maximum payload of one message, in bytes
    """

    def __init__(self, result: KeptResult, part_bytes: int) -> None:
        self.result = result
        self.part_bytes = part_bytes
        self._versions: dict[int, list[int]] = {}

    def state(self) -> dict[str, list[int]]:
        """Return the versions by client, for a checkpoint."""
        return {str(client): versions for client, versions in sorted(self._versions.items())}

    def restore(self, state: dict[str, list[int]]) -> None:
        """Restore the versions that ``state`` returned."""
        self._versions = {int(client): versions for client, versions in state.items()}

    def forget(self, client: int) -> None:
        """Reset a client that lost its layers to the dense model."""
        self._versions.pop(client, None)

    def stale(self, client: int, model: Layers) -> list[int]:
        """Return the layers whose version at a client differs from the model's."""
        held = self._held(client)
        return [index for index, version in enumerate(model.versions) if version != held[index]]

    def push(
        self,
        rounds: Rounds,
        server_round: int,
        model: Layers,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        """Push to every active client its stale layers, part by part.

        Clients that need the same part receive it in the same step, and their messages share its
        blobs. So only one part is in memory, for any number of clients.

        Parameters
        ----------
        rounds : rounds that make the requests
        server_round : round of the messages
        model : layers to push
        ends : client -> number of layers that it reads; later layers are not pushed. None means all
            layers
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
                rounds.push_all(
                    self._messages(rounds, clients, server_round, model, list(blocks), part)
                )
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
