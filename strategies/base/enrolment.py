"""Enrolment: each site with the server's program and base model receives a seat and keeps it.

Covers: the first node that enrols under a site's name holds the seat as long as it is connected and
answers. Another node with the same name is only remembered. It receives the seat when the first
node is gone or has let the deadlines of all attempts pass: Flower lists a dead node for a while
longer, and a restarted site has a new node id. One missed deadline, or an error that Flower reports
for a connected node, does not free a seat. Refused nodes do not make the others wait longer. While
seats are free, the answer of a connected node is waited for as long as that of any other message.
With the sites' public keys (``site-keys``), a node must sign the request with its site's key. A
node without a valid signature, or with a name that has no key, is refused before it counts for
anything, also when a seat is reassigned.
Does not cover, without these keys: the identity of a node. A node that claims a name before its
owner has the seat. A node that waits receives the seat of a site that dies or is too slow for all
its attempts.
Does not cover, with keys: two nodes that have the private key of one site.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from flwr.app import Message

from espalier.amounts import count, duration
from espalier.errors import EspalierError, InputError
from espalier.flower.load_faults import TRIES, could_not_load
from espalier.identity.site_keys import PUBLIC, PublicKeys
from espalier.messages.enrolment import Challenge, Enrolment, Refusal, SignedEnrolment, refused_by
from espalier.messages.message import MessageBody, NoFields, validate
from espalier.messages.signed_name import is_signed, new_nonce, statement
from strategies.base.roster import Seat
from strategies.base.rounds import POLL_SECONDS, Request, Rounds, error_of

NO_CLIENT = -1
REFUSED_SECONDS = 15.0
"""Maximum seconds until refused nodes have the reason; a SuperNode polls every 3 seconds."""
TELL_SECONDS = 10.0
"""Seconds between two lines on the number of connected sites if nothing changes."""


START_SECONDS = 3600.0
"""Seconds that a simulation waits for the answer of a connected node, at least.

On a busy machine minutes may pass before a simulated client's worker has started.
"""
SECOND = "a second node with this site name; give each node its own site name"


@dataclass(frozen=True)
class _Question:
    """Request for a node's name."""

    node_id: int
    request: Request
    since: float
    """Time at which it was sent."""


@dataclass
class Enroller:
    """Enrolment of the connected nodes: asks each for its name and assigns the seats."""

    rounds: Rounds
    code_sha256: str
    model_sha256: str
    """Hash of the server's base model; a site with another one is refused."""
    keys: PublicKeys | None = None
    """Public keys of the sites; None if names are accepted without a signature."""
    read_keys: Callable[[], PublicKeys] | None = None
    """Reader of the keys as they are now, for a site whose key came after the run's start."""
    _asked: set[int] = field(default_factory=set)
    _tries: Counter[int] = field(default_factory=Counter)
    """Number of times that each node was asked."""
    _waiting: dict[str, "_Question"] = field(default_factory=dict)
    """Questions that nodes have not answered yet, by message id."""
    _unconfirmed_refusals: dict[str, tuple[int, Request]] = field(default_factory=dict)
    """Refusals sent to nodes that have not confirmed them yet, by message id."""
    _claims: dict[str, list[int]] = field(default_factory=dict)
    """Further nodes that claim a site's name, in the order of their answers."""

    def enrol(self, clients: dict[str, int] | None = None) -> None:
        """Assign seats to sites.

        ``clients`` has the client number by site of an earlier part of this run. If None, the first
        ``num-clients`` sites in order of their names become clients 0, 1, ... Raises RunFailed if
        fewer sites than the quorum enrolled before ``enrol-seconds`` passed without a new site that
        can have a seat.
        """
        rounds = self.rounds
        settings = rounds.settings
        num_wanted = settings.num_clients if clients is None else len(clients)
        now = rounds.clock.now()
        end = now + settings.enrol_seconds
        last = now + self._patience()
        rounds.progress.begin("enrolling", num_wanted, of_clients=True)
        sites: dict[str, tuple[int, Enrolment]] = {}
        reported = -1
        reported_at = 0.0
        # 1. Ask nodes and take answers until enough sites are found or time is up.
        while True:
            for node_id, enrolment in self._newly_enrolled():
                is_new = self._take(node_id, enrolment, sites)
                # A site that can have a seat extends the wait; others, for instance refused ones,
                # do not.
                if is_new and (
                    len(sites) <= num_wanted if clients is None else enrolment.site in clients
                ):
                    end = rounds.clock.now() + settings.enrol_seconds
                    last = rounds.clock.now() + self._patience()
            # Simulated clients queue for this machine's workers, so a busy worker extends the wait.
            if self._waiting and rounds.somebody_works():
                end = rounds.clock.now() + settings.enrol_seconds
            num_found = len(sites if clients is None else sites.keys() & clients.keys())
            # Connected nodes that have not answered yet are waited for longer, while seats are
            # free.
            waits = (num_found < num_wanted or rounds.shared_workers) and self._unanswered()
            until = max(end, last) if waits else end
            now = rounds.clock.now()
            if num_found != reported or now - reported_at >= TELL_SECONDS:
                reported = num_found
                reported_at = now
                self._tell(num_found, num_wanted, until - now)
            # All questions are answered, so no further site can change the choice of clients.
            if (num_found >= num_wanted and not self._waiting) or rounds.clock.now() >= until:
                break
            rounds.clock.sleep(POLL_SECONDS)
        # 2. Assign client numbers.
        # Sorted by name, so that the numbers do not depend on the order of arrival.
        if clients is None:
            clients = {site: client for client, site in enumerate(sorted(sites)[:num_wanted])}
        # 3. Tell the nodes that have no seat.
        if min(len(sites), len(clients)) < settings.num_clients:
            self._report_missing_sites(clients, sites)
        else:
            why = f"the run already has its num-clients = {settings.num_clients} sites"
            for site in sorted(sites.keys() - clients.keys()):
                self._tell_node(sites[site][0], why)
        self._await_confirmations()
        # 4. Seat the sites, and go on only if they are enough.
        self._seat(clients, sites)
        rounds.seat_with(self)
        rounds.require_quorum(len(clients.keys() & sites.keys()), "enrolled")

    def _report_missing_sites(
        self, clients: Mapping[str, int], sites: Mapping[str, tuple[int, Enrolment]]
    ) -> None:
        """Record why seats stay free: nodes that did not answer, and sites that came too late."""
        free = len(clients) < self.rounds.settings.num_clients
        for site in sorted(sites.keys() - clients.keys()) if free else ():
            why = "the run began without it, and a resumed run keeps its clients; start a new run"
            self._refuse(site, why, sites[site][0])
        now = self.rounds.clock.now()
        for question in self._unanswered():
            waited = duration(now - question.since)
            why = f"connected, but did not answer within {waited}; read the log of the node"
            self._refuse(f"node {question.node_id}", why)

    def _unanswered(self) -> list[_Question]:
        """Return the questions to connected nodes that have no answer yet."""
        connected = set(self.rounds.grid.get_node_ids())
        return [question for question in self._waiting.values() if question.node_id in connected]

    def _patience(self) -> float:
        """Return the seconds that connected nodes may take for their answers after the last site.

        A node that starts on a busy machine may need minutes. The time does not count from the
        question, because a node that restarts again and again is asked each time.
        """
        simulated = self.rounds.shared_workers
        return START_SECONDS if simulated else self.rounds.settings.deadline_seconds

    def look_for_nodes(self) -> None:
        """Ask newly connected nodes for their names; remember those that claim a seated site."""
        for node_id, enrolment in self._newly_enrolled():
            if (
                not self._refusal(enrolment)
                and self.rounds.roster.of_site(enrolment.site) is not None
            ):
                self._claims.setdefault(enrolment.site, []).append(node_id)

    def reseat(self, seat: Seat) -> None:
        """Move a seat to the next connected node that claims its site's name, if there is one.

        The present holder, if still connected, becomes the last in line.
        """
        self.look_for_nodes()
        connected = set(self.rounds.grid.get_node_ids())
        claims = [node_id for node_id in self._claims.get(seat.site, ()) if node_id in connected]
        if not claims:
            return
        # The former holder stays in line: it may only have been slow.
        last = [seat.node_id] if seat.node_id in connected else []
        seat.node_id, *self._claims[seat.site] = claims + last
        # The node had been refused as the second one of its name.
        self.rounds.roster.refused.pop(seat.site, None)
        text = f"reconnected  {seat.site}: it now answers from another node"
        self.rounds.progress.note("seated_again", text, client=seat.client, site=seat.site)

    def _take(
        self, node_id: int, enrolment: Enrolment, sites: dict[str, tuple[int, Enrolment]]
    ) -> bool:
        """Record an enrolled site and return True if it is new.

        A second node of a name is only remembered while the first is connected.
        """
        site = enrolment.site
        is_new = enrolment.site not in sites
        if reason := self._refusal(enrolment):
            self._refuse(site, reason, node_id)
            return False
        # The first node keeps the seat; otherwise anybody could take a seat by using its site's
        # name.
        if not is_new and sites[site][0] in self.rounds.grid.get_node_ids():
            if site not in self._claims and self.rounds.roster.refuse(site, SECOND) is not None:
                text = f"refused      a second node named {site}; give each node its own site name"
                self.rounds.progress.note("refused", text, who=site, reason=SECOND)
            self._tell_node(node_id, SECOND)
            self._claims.setdefault(site, []).append(node_id)
            return False
        sites[site] = (node_id, enrolment)
        # Discard a refusal of another node of this name, or of this node's earlier answer.
        self.rounds.roster.refused.pop(site, None)
        return is_new

    def _tell(self, num_found: int, num_wanted: int, seconds: float) -> None:
        """Show how many sites are connected, and how long the server waits for more."""
        waiting = (
            f", waiting up to {duration(max(0.0, seconds))} for more"
            if num_found < num_wanted
            else ""
        )
        sites = (
            f"{num_found} of {count(num_wanted, 'site')}"
            if num_found <= num_wanted
            else f"{count(num_found, 'site')}, {num_wanted} take part,"
        )
        text = f"enrolling    {sites} connected{waiting}"
        self.rounds.progress.note("connected", text, sites=num_found, wanted=num_wanted)

    def _seat(self, clients: dict[str, int], sites: Mapping[str, tuple[int, Enrolment]]) -> None:
        for site, client in sorted(clients.items(), key=lambda item: item[1]):
            if site not in sites:
                self.rounds.roster.seats[client] = Seat(client, site, 0)
                continue
            node_id, enrolment = sites[site]
            self.rounds.roster.seats[client] = Seat(
                client,
                site,
                node_id,
                capability=enrolment.capability,
                measured=enrolment.measured,
                approval=enrolment.approval,
            )
            self.rounds.progress.step(
                "enrolled", f"{site}: client {client}", site=site, client=client
            )

    def _newly_enrolled(self) -> Iterator[tuple[int, Enrolment]]:
        """Ask nodes that have not been asked, and yield the answers that have arrived."""
        # Sorted, so that simulated runs ask in the same order every time.
        for node_id in sorted(set(self.rounds.grid.get_node_ids()) - self._asked):
            self._asked.add(node_id)
            self._tries[node_id] += 1
            # A fresh nonce per question: an earlier signature cannot be replayed.
            fields = NoFields() if self.keys is None else Challenge(nonce=new_nonce())
            request = self.rounds.request("enrol", NO_CLIENT, 0, fields)
            if (message_id := self.rounds.send(request, node_id)) is not None:
                since = self.rounds.clock.now()
                self._waiting[message_id] = _Question(node_id, request, since)
        for message_id, question in list(self._waiting.items()):
            node_id = question.node_id
            if (reply := self.rounds.pull(message_id)) is not None:
                del self._waiting[message_id]
                # The node's program did not start, for instance while files were copied; it may
                # work next time.
                if could_not_load(reply) and self._tries[node_id] < TRIES:
                    self._asked.discard(node_id)
                    continue
                if (enrolment := self._read(reply, node_id, question.request)) is not None:
                    yield node_id, enrolment

    def _read(self, reply: Message, node_id: int, request: Request) -> Enrolment | None:
        notified: int | None = node_id
        try:
            if not reply.has_content():
                # A node that could not run the app cannot receive the reason either.
                notified = None
                raise InputError(error_of(reply))
            body = self.rounds.checked(reply, request)
            if body.header.status == "ok":
                return self._known(body, node_id, request)
            notified, (site, reason) = None, refused_by(str(body.fields["reason"]))
            # The answer of a failed enrolment is not signed, so its site name is only a claim.
            if site and self.keys is not None:
                site, reason = "", f"claims to be {site}: {reason}"
        except EspalierError as error:
            site = ""
            reason = str(error)
        self._refuse(site or f"node {node_id}", reason, notified)
        return None

    def _known(self, body: MessageBody, node_id: int, request: MessageBody) -> Enrolment:
        """Return a node's enrolment, after checking its signature if the run has site keys.

        Raises InputError if the site has no key in ``site-keys``, or the signature is missing or
        not valid.
        """
        if self.keys is None:
            return validate(Enrolment, body.fields)
        signed = validate(SignedEnrolment, body.fields)
        claim = f"claims to be {signed.site}"
        # An operator may have added the site's key after the start.
        if signed.site not in self.keys and self.read_keys is not None:
            # A key file that is just being written is invalid; the node is refused without it.
            with suppress(EspalierError):
                self.keys = self.read_keys()
        key = self.keys.get(signed.site)
        if key is None:
            raise InputError(
                f"{claim}, but site-keys has no key of this site; put {signed.site}{PUBLIC} there"
                " if it may take part"
            )
        if not signed.signature:
            raise InputError(
                f"{claim}, but did not prove it; set site-key in --node-config to its private key"
            )
        # The statement binds the signature to this question, run and node.
        text = statement(
            signed.unsigned(), request.fields["nonce"], request.header.lineage, node_id
        )
        if not is_signed(key, text, signed.signature):
            raise InputError(f"{claim}, but does not have the key of {signed.site} in site-keys")
        return signed

    def _refuse(self, who: str, reason: str, node_id: int | None = None) -> None:
        """Refuse a site or node, show the reason, and send it to ``node_id``, if that is given."""
        if (shown := self.rounds.roster.refuse(who, reason)) is not None:
            text = f"refused      {who}: {shown}"
            self.rounds.progress.note("refused", text, who=who, reason=shown)
            if node_id is not None:
                self._tell_node(node_id, reason)

    def _tell_node(self, node_id: int, reason: str) -> None:
        """Send a node the reason for its own log; simulated nodes share the run's log."""
        # In a simulation the node's log is this run's log.
        if self.rounds.shared_workers:
            return
        request = self.rounds.request("refused", NO_CLIENT, 0, Refusal.because(reason))
        if (message_id := self.rounds.send(request, node_id)) is not None:
            self._unconfirmed_refusals[message_id] = (node_id, request)

    def _await_confirmations(self) -> None:
        """Wait until refused nodes have confirmed the reason, up to ``REFUSED_SECONDS``.

        Flower discards undelivered messages at the end of a run.
        """
        clock = self.rounds.clock
        grid = self.rounds.grid
        end = clock.now() + REFUSED_SECONDS
        while True:
            # A node that has gone will never confirm.
            connected = set(grid.get_node_ids())
            for message_id, (node_id, request) in list(self._unconfirmed_refusals.items()):
                if (reply := self.rounds.pull(message_id)) is None and node_id in connected:
                    # A lost confirmation only costs time.
                    continue
                del self._unconfirmed_refusals[message_id]
                if reply is not None and reply.has_content():
                    # The content does not matter, but the ledger has to count its bytes.
                    with suppress(EspalierError):
                        self.rounds.checked(reply, request)
            if not self._unconfirmed_refusals or clock.now() >= end:
                return
            clock.sleep(POLL_SECONDS)

    def _refusal(self, enrolment: Enrolment) -> str | None:
        """Return the reason why a site cannot take part; None if it can."""
        # Different code may compute other masks or read messages in another way.
        if enrolment.code_sha256 != self.code_sha256:
            return (
                f"runs another version of the program ({enrolment.code_sha256[:12]}, the server"
                f" has {self.code_sha256[:12]}); install the same release on server and nodes,"
                " or stop a SuperLink that another copy of the project started"
            )
        needed = self.rounds.settings.job.NEEDS_BASE_MODEL
        if needed and enrolment.model_sha256 != self.model_sha256:
            return (
                f"has another base model ({enrolment.model_sha256[:12]}, the server has"
                f" {self.model_sha256[:12]}); give the node the same weights, tokenizer and"
                " config.json with model-path (with models=hub, start the run with a commit:"
                " model=owner/name@COMMIT)"
            )
        return None
