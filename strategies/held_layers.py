"""Which layers of the global model each client of FedSpaLLM holds, and the messages that bring it those that are stale."""

from collections.abc import Iterator

from flwr.app import Message

from espalier.wire.fedspallm import Update
from espalier.wire.payload import block_key
from espalier.wire.plan import cut_into_parts
from strategies.kept_result import KeptResult
from strategies.rounds import Rounds


class HeldLayers:
    """The version of every layer at every client; at first all clients hold the dense model.

    Parameters
    ----------
    result : the global model
    part_bytes : largest payload of one message
    """

    def __init__(self, result: KeptResult, part_bytes: int) -> None:
        self.result = result
        self.part_bytes = part_bytes
        self._versions: dict[int, list[int]] = {}

    def state(self) -> dict[str, list[int]]:
        """Versions by rank, for a checkpoint."""
        return {str(rank): versions for rank, versions in sorted(self._versions.items())}

    def restore(self, state: dict[str, list[int]]) -> None:
        """Take over what ``state`` returned."""
        self._versions = {int(rank): versions for rank, versions in state.items()}

    def stale(self, rank: int) -> list[int]:
        """Layers of which a client holds another version than the global model's."""
        current = self.result.versions
        held = self._versions.get(rank, [0] * len(current))
        return [index for index, version in enumerate(current) if version != held[index]]

    def updates(self, rounds: Rounds, server_round: int) -> Iterator[list[Message]]:
        """Messages that bring every active client its stale layers, part by part.

        Clients that get the same part are asked together, and their messages share its blobs, so that memory holds one part
        at a time whatever the number of clients.
        """
        stale = {seat.rank: self.stale(seat.rank) for seat in rounds.roster.active()}
        parts = {rank: self._cut(blocks) for rank, blocks in stale.items() if blocks}
        for part in range(max(map(len, parts.values()), default=0)):
            wanted = {rank: tuple(cut[part]) for rank, cut in parts.items() if part < len(cut)}
            for blocks in sorted(set(wanted.values())):
                ranks = {rank for rank in wanted if wanted[rank] == blocks}
                yield self._messages(rounds, ranks, server_round, list(blocks), part)
        for rank in parts:
            self._versions[rank] = list(self.result.versions)

    def _cut(self, blocks: list[int]) -> list[list[int]]:
        sizes = [self.result.num_bytes(index) for index in blocks]
        return [[blocks[place] for place in part] for part in cut_into_parts(sizes, self.part_bytes)]

    def _messages(self, rounds: Rounds, ranks: set[int], server_round: int, blocks: list[int], part: int) -> list[Message]:
        update = Update(
            blocks=blocks,
            versions=[self.result.versions[index] for index in blocks],
            num_kept=[number for index in blocks for number in self.result.num_kept[index]],
        )
        blobs = {block_key(index): self.result.blob(index) for index in blocks}
        seats = [seat for seat in rounds.roster.active() if seat.rank in ranks]
        return [rounds.request("deliver", seat, server_round, update, blobs, part) for seat in seats]
