"""Enrolment: sites that run the same program on the same model receive a seat each."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from espalier.settings.mistakes import Mistake
from espalier.wire.contract import check_reply
from espalier.wire.contracts import contract_for
from espalier.wire.enrolment import Enrolment
from espalier.wire.messages import Letter, NoScalars, read
from strategies.roster import Seat
from strategies.rounds import POLL_SECONDS, Rounds

NO_RANK = -1


@dataclass
class Enroller:
    """Asks every node once who it is."""

    rounds: Rounds
    code_sha256: str
    model_sha256: str
    """What the server itself has; a site with another one is turned away."""
    _asked: set[int] = field(default_factory=set)
    _waiting: dict[str, tuple[int, Letter]] = field(default_factory=dict)
    _returned: dict[str, int] = field(default_factory=dict)
    """Site -> node id of sites that came back and wait for their seats."""

    def enrol(self, ranks: dict[str, int] | None = None) -> None:
        """Give seats to sites.

        Parameters
        ----------
        ranks : site -> rank of an earlier part of this run; without it the first ``num-clients`` sites, in order of
            their names, receive the ranks 0, 1, ...

        Raises
        ------
        RunFailed
            Fewer sites than the quorum came before ``enrol-seconds`` had passed without a new one.
        """
        rounds, settings = self.rounds, self.rounds.settings
        wanted = settings.num_clients if ranks is None else len(ranks)
        end = rounds.clock.now() + settings.enrol_seconds
        rounds.progress.begin("enrolling", wanted)
        sites: dict[str, tuple[int, Enrolment]] = {}
        while True:
            for node_id, enrolment in self._newly_enrolled():
                if reason := self._refusal(enrolment, sites):
                    self._refuse(enrolment.site, reason)
                else:
                    sites[enrolment.site] = (node_id, enrolment)
                end = rounds.clock.now() + settings.enrol_seconds
            found = len(sites if ranks is None else sites.keys() & ranks.keys())
            if (found >= wanted and not self._waiting) or rounds.clock.now() >= end:
                break
            rounds.clock.sleep(POLL_SECONDS)
        if ranks is None:
            ranks = {site: rank for rank, site in enumerate(sorted(sites)[:wanted])}
        self._seat(ranks, sites)
        rounds.look_for_nodes, rounds.seat_returned_nodes = self.look_for_nodes, self.seat_returned_nodes
        rounds.require_quorum(len(ranks.keys() & sites.keys()), "enrolled")

    def look_for_nodes(self) -> None:
        """Ask nodes that were not there before who they are."""
        for node_id, enrolment in self._newly_enrolled():
            if not self._refusal(enrolment, ()):
                self._returned[enrolment.site] = node_id

    def seat_returned_nodes(self) -> None:
        """Give sites that came back their seats under their new node ids."""
        self.look_for_nodes()
        for site, node_id in self._returned.items():
            if (seat := self.rounds.roster.of_site(site)) is not None:
                seat.node_id = node_id
        self._returned.clear()

    def _seat(self, ranks: dict[str, int], sites: Mapping[str, tuple[int, Enrolment]]) -> None:
        for site, rank in sorted(ranks.items(), key=lambda item: item[1]):
            seat = self.rounds.roster.seats[rank] = Seat(rank, site, 0)
            if site in sites:
                seat.node_id, enrolment = sites[site]
                seat.capability, seat.measured = enrolment.capability, enrolment.measured
                self.rounds.progress.step("enrolled", f"{site} takes part as client {rank}", site=site, rank=rank)

    def _newly_enrolled(self) -> Iterator[tuple[int, Enrolment]]:
        """Ask nodes that have not been asked, and yield those whose answers have arrived."""
        for node_id in sorted(set(self.rounds.grid.get_node_ids()) - self._asked):
            self._asked.add(node_id)
            seat = Seat(NO_RANK, "", node_id)
            request = read(self.rounds.request("enrol", seat, 0, NoScalars()).content)
            if (message_id := self.rounds.push(request, seat)) is not None:
                self._waiting[message_id] = (node_id, request)
        for message_id, (node_id, request) in list(self._waiting.items()):
            if (reply := self.rounds.pull(message_id)) is not None:
                del self._waiting[message_id]
                if (enrolment := self._read(reply, node_id, request)) is not None:
                    yield node_id, enrolment

    def _read(self, reply: Message, node_id: int, request: Letter) -> Enrolment | None:
        try:
            if not reply.has_content():
                raise Mistake(f"Flower reports error {reply.error.code}")
            letter = read(reply.content)
            self.rounds.folder.ledger.record("up", NO_RANK, letter, reply.content)
            scalars = check_reply(letter, request, contract_for(request, self.rounds.plan, self.rounds.settings))
            if isinstance(scalars, Enrolment):
                return scalars
            reason = str(letter.scalars["reason"])
        except OSError:  # no reply is to blame for this server's disk
            raise
        except Exception as error:  # whatever a reply does to its reader, it costs its sender alone
            reason = str(error) if isinstance(error, Mistake) else f"unexpected {type(error).__name__}"
        self._refuse(f"node {node_id}", reason)
        return None

    def _refuse(self, who: str, reason: str) -> None:
        self.rounds.roster.refused[who] = reason
        self.rounds.progress.note("refused", f"refused      {who}: {reason}", who=who, reason=reason)

    def _refusal(self, enrolment: Enrolment, sites: Container[str]) -> str | None:
        """Why a site cannot take part; None if it can."""
        if enrolment.code_sha256 != self.code_sha256:
            return (
                f"runs another version of the program ({enrolment.code_sha256[:12]}, the server {self.code_sha256[:12]}); "
                "install the same release on server and nodes, or stop a SuperLink that another copy of the project started"
            )
        if enrolment.model_sha256 != self.model_sha256:
            return (
                f"has another base model ({enrolment.model_sha256[:12]}, the server {self.model_sha256[:12]}); "
                "give the node the same model and tokenizer with model-path"
            )
        if enrolment.site in sites:
            return "a second node with this site name; give each node a site name of its own"
        return None
