"""Client's side of secure sums: keys, shares, masked summands, and shares to unmask the sum.

Covers: a server that sends wrong lists. The client computes its neighbours and the threshold
itself. It answers each exchange of a session once; the same request gets the same answer. It helps
to unmask one sum per round, whose clients it confirmed to the others and enough of them to it, so
that all clients unmask the same sum (``espalier.secure_sum.confirmation``). All clients of a sum
have the same settings, order and pushed tensors: otherwise a server could choose those of the
others so that it knows what they contribute. A client gives the seed of its own mask, and for each
other client a share of one secret: of the own mask's seed if that client is in the sum, of the mask
key if it dropped out. A new session has new keys and new masks, and is
refused after a sum of the round was unmasked, because the difference of two sums may be the tensors
of one client. ``earlier_sums`` compares the sums of all runs. Secrets are deleted when the client
has helped to unmask.
Covers, with the public keys of the other sites (``peer-keys``): a server, or anybody else between,
that replaces keys of a site by its own.
Does not cover, without them: such a server; it can read everything. Clients that send wrong
summands, which nobody sees. What the sum itself tells, also of clients that all got a malicious
order.
"""

import json
import sys
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, TypeVar

from client_app.protocol.answer_once import stored_reply
from client_app.protocol.earlier_sums import require_same_sites
from client_app.protocol.sum_party import Party
from client_app.site import Site, reply_to
from client_app.summands.plain_blob import PlainBlob, ToSummands
from espalier.errors import InputError
from espalier.identity.site_keys import private_key as site_private_key
from espalier.identity.site_keys import public_keys
from espalier.messages.contracts import plain_contract
from espalier.messages.message import Fields, Header, MessageBody, NoFields, validate
from espalier.messages.signed_name import is_signed, sign
from espalier.messages.sums.masked_summands import mask_summand, places_in_mask
from espalier.messages.sums.secure_sum import (
    Confirmed,
    ConfirmOrder,
    Masked,
    MaskOrder,
    SessionOrder,
    ShareOrder,
    Shares,
    Unmask,
    UnmaskOrder,
    key_statement,
    summand_specs,
)
from espalier.messages.sums.summands import Numbers, pack
from espalier.messages.sums.summed_weights import WITHHELD
from espalier.messages.tensor_blobs import pack_tensors, views
from espalier.secure_sum.keys import (
    Session,
    new_seed,
    private_key,
    public_bytes,
)
from espalier.settings.registry import METHODS, part
from espalier.settings.tables.noise_share import NoiseShare
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState

F = TypeVar("F", bound=Fields)

FEW_NUMBERS = 8
"""Size below which a tensor may be the same in other runs by chance."""
CONFIRMATIONS = ("confirmed", "tags")
"""Fields of an ``unmask`` by which the client verifies that others have its list of the sum."""
DOCUMENT = "secure-sum"
"""Name of a per-round document: secrets, requests and answers of the last session."""
UNMASKED = "unmasked"
"""Name of a lasting document: rounds of which this client has helped to unmask a sum.

It outlasts the documents of the rounds, which are deleted when a later round begins.
"""


def advertise(
    site: Site, request: MessageBody, train: Callable[[Site, MessageBody], MessageBody]
) -> MessageBody:
    """Answer a ``train``: do the work, keep the tensors, and reply with new public keys."""
    header = request.header
    session = validate(site.contract.down.fields, request.fields).model_dump()["session"]
    # The session is not part of the work: a new session must not train again.
    order = {name: value for name, value in request.fields.items() if name != "session"}
    plain = MessageBody(header, order, request.blobs, request.tensors)
    # The plain reply is computed and stored as without secure sums.
    report = train(site.with_plain_contract(plain), plain).fields
    state = site.state(header)
    with state.locked():
        kept = state.load(header.server_round, DOCUMENT)
        # A new session gets new secrets: masks are never used twice.
        if kept is None or kept["session"] != session:
            if header.server_round in _unmasked(state):
                raise InputError(
                    f"train: this client has helped to unmask a sum of round"
                    f" {header.server_round}; a second one could show a single client's tensors;"
                    " start a new run"
                )
            # Sites of the round's first list, against which later lists are compared.
            sites = kept["sites"] if kept else []
            kept = {
                **_new_keys(site, header, session),
                "sites": sites,
                # Settings, order and pushed tensors, on which the summands rest.
                "inputs": stored_reply(site, header, "reply")["asked"],
            }
            state.save(header.server_round, DOCUMENT, kept)
    # Numbers that only the sum may contain.
    withheld = {name: 0 for name in WITHHELD if name in report}
    # By hashes of the plain tensors the server could test what it guesses of them.
    report = {**report, **withheld, "blob_sha256": [], **kept["advertised"]}
    return reply_to(request, validate(site.contract.up.fields, report))


def _unmasked(state: PrivateState) -> list[int]:
    """Return the rounds of which this client has helped to unmask a sum."""
    rounds: list[int] = (state.load_lasting(UNMASKED) or {"rounds": []})["rounds"]
    return rounds


def _new_keys(site: Site, header: Header, number: str) -> dict[str, Any]:
    """Return the document of a new session: three random secrets, and two public keys."""
    session = Session(header.lineage, header.server_round, number)
    # Independent secrets: for common masks, for the encryption of shares, and for the own mask.
    secrets = {name: new_seed().hex() for name in ("mask", "share", "own")}
    keys = {
        f"{name}_key": public_bytes(private_key(bytes.fromhex(secrets[name]), session, name))
        for name in ("mask", "share")
    }
    # Without a site key others cannot know whose keys these are.
    signature = ""
    if site.node.site_key:
        text = key_statement(
            header.lineage,
            header.server_round,
            number,
            header.client,
            site.name,
            [keys["mask_key"], keys["share_key"]],
        )
        signature = sign(site_private_key(site.node.site_key), text)
    return {
        "session": number,
        "secrets": secrets,
        "advertised": {**keys, "signature": signature},
    }


def share(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``shares``: check everybody's keys, and share this client's two secrets."""
    order = validate(ShareOrder, request.fields)

    def work(kept: dict[str, Any]) -> Shares:
        # The server could list other keys for this client than it sent.
        _require_own_entry(site, request.header, order, kept["advertised"])
        _require_enough(site, "shares", len(order.clients))
        _require_known_sites(site, request.header, order)
        _require_enough_noise(site, order, kept["sites"])
        # The first list of the round stays.
        kept["sites"] = kept["sites"] or order.sites
        kept["order"] = request.fields
        # Shares are made of the list as this client sees it; others with another list cannot read
        # them.
        shares, kept["own_shares"] = Party(request.header, kept).split_secrets()
        return shares

    return reply_to(request, _answer_step(site, request, Shares, work))


def mask(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``masked``: take the shares of the others, and send a part of masked summands."""
    header = request.header
    if header.part:
        # Later parts of the same answer.
        return reply_to(request, NoFields(), _masked_part(site, request))
    order = validate(MaskOrder, request.fields)

    def work(kept: dict[str, Any]) -> Masked:
        # The client checks the lists itself, because a server may send different ones to each
        # client.
        party = Party(header, kept)
        party.require_members(order.members)
        if order.sources != party.among(order.members):
            raise InputError("masked: the sources are not this client's neighbours")
        received, unreadable = party.received_shares(order)
        # Stored with the answer: the secrets of others are needed to unmask.
        kept |= {"members": order.members, "received": received}
        return Masked(unreadable=unreadable)

    report = _answer_step(site, request, Masked, work, after="shares")
    return reply_to(request, report, _masked_part(site, request))


def confirm(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``confirm`` with a tag of the list of the sum for each other client in it."""
    order = validate(ConfirmOrder, request.fields)

    def work(kept: dict[str, Any]) -> Confirmed:
        party = Party(request.header, kept)
        # This client unmasks only this list.
        party.require_included(order.included)
        _require_enough(site, "confirm", len(order.included))
        _require_same_sites(site, request.header, party, order.included)
        kept["included"] = order.included
        return Confirmed(tags=party.tags())

    return reply_to(request, _answer_step(site, request, Confirmed, work, after="masked"))


def unmask(site: Site, request: MessageBody) -> MessageBody:
    """Answer an ``unmask`` with secrets and shares; this happens once in a round.

    Another set of confirmations makes no other request: after a resume other clients may answer.
    """
    order = validate(UnmaskOrder, request.fields)

    def work(kept: dict[str, Any]) -> Unmask:
        party = Party(request.header, kept)
        # The list that it confirmed, and enough confirmations of others for the same list.
        party.require_same_list(order)
        party.require_confirmed(order)
        _require_same_sites(site, request.header, party, order.included)
        return party.shares_of(order)

    report = _answer_step(site, request, Unmask, work, after="confirm", leaves_out=CONFIRMATIONS)
    return reply_to(request, report)


def _answer_step(
    site: Site,
    request: MessageBody,
    answer: type[F],
    work: Callable[[dict[str, Any]], F],
    after: str = "",
    leaves_out: Collection[str] = (),
) -> F:
    """Return the stored answer to the same request of a session, or that of ``work``.

    ``answer_once`` does not fit, because a round may have several sessions, whose steps have an
    order.

    Parameters
    ----------
    work : function of the session's document, which it may extend; returns the answer
    after : kind of the step before
    leaves_out : fields that do not make a request another one
    """
    state = site.state(request.header)
    server_round = request.header.server_round
    kind = request.header.kind
    fields = {name: value for name, value in request.fields.items() if name not in leaves_out}
    request_sha256 = sha256(json.dumps(sorted(fields.items())).encode())
    with state.locked():
        kept = session_of(state, server_round, request.fields["session"], kind)
        previous = kept.get(kind)
        if previous is not None:
            # A second answer of the same step could reveal a secret.
            if previous["asked"] != request_sha256:
                raise InputError(f"{kind}: this client answered another request of this session")
            return validate(answer, previous["answer"])
        if "unmask" in kept or (after and after not in kept):
            # Steps have an order, and nothing is answered after ``unmask``.
            raise InputError(f"{kind}: arrived out of order in this session")
        reply = work(kept)
        kept[kind] = {"asked": request_sha256, "answer": reply.model_dump()}
        if kind == "unmask":
            # First this record: a crash between the two writes must not allow another session.
            rounds = sorted({*_unmasked(state), server_round})
            state.save_lasting(UNMASKED, {"rounds": rounds})
            # Secrets are deleted: nobody can unmask with this client's help again.
            needed = ("session", "advertised", "sites", "confirm", "unmask")
            kept = {name: kept[name] for name in needed}
        state.save(server_round, DOCUMENT, kept)
        return reply


def session_of(state: PrivateState, server_round: int, number: str, kind: str) -> dict[str, Any]:
    """Return the document of a session; InputError if it is not the last one of its round."""
    kept = state.load(server_round, DOCUMENT)
    # A new session replaces the document, so earlier sessions cannot go on.
    if kept is None or kept["session"] != number:
        raise InputError(
            f"{kind}: this client has no keys of this session of round {server_round}; the server"
            " must ask for new keys"
        )
    return kept


def _masked_part(site: Site, request: MessageBody) -> dict[str, bytes]:
    """Return the masked summands of one part, by blob key."""
    header = request.header
    state = site.state(header)
    number = validate(SessionOrder, {"session": request.fields["session"]}).session
    kept = session_of(state, header.server_round, number, "masked")
    # The secrets are gone after ``unmask``, and the masks with them.
    if "masked" not in kept or "secrets" not in kept:
        raise InputError("masked: arrived out of order in this session")
    party = Party(header, kept)
    specs = summand_specs(header.server_round, site.model.plan, site.settings)
    # Every summand has its own range of the mask's key stream.
    places = places_in_mask(specs)
    pairs = party.pair_keys()
    own_key = party.own_key()
    summands = PlainReply(site, header)
    blobs = {}
    # One blob of the plain reply in memory at a time.
    for key in site.contract.up.blobs:
        packed = {}
        for name, numbers in summands.numbers(key).items():
            spec = specs[key][name]
            packed[name] = pack(numbers, spec)
            # Own mask, plus and minus the common masks, modulo 2^bits.
            mask_summand(packed[name], spec, places[key, name], party.client, own_key, pairs)
        blobs[key] = pack_tensors(packed)
    return blobs


class PlainReply:
    """Plain reply of a client to the ``train`` of a round, which stays at the site."""

    def __init__(self, site: Site, header: Header) -> None:
        self._site = site
        train = header.model_copy(update={"kind": "train", "part": 0})
        kept = stored_reply(site, train, "reply")
        self.report: dict[str, Any] = kept["report"]
        """Fields of the plain report."""
        self._store = site.state(header).blobs(header.server_round)
        request = MessageBody(train, kept["order"])
        # The plain contract, whose blobs the stored reply has.
        contract = plain_contract(request, lambda: site.model.plan, site.settings)
        keys = chain.from_iterable(contract.parts)
        self._hashes = dict(zip(keys, self.report["blob_sha256"], strict=True))
        convert: ToSummands = part(METHODS[site.settings.method].to_summands)
        self._convert = convert

    def tensors_sha256(self) -> set[str]:
        """Return the hash of each tensor, and one of all blobs together.

        Tensors of few numbers, or of equal ones, have no hash of their own: numbers of tokens, and
        sums of inputs that are always zero, are the same in many runs.
        """
        found = {sha256(json.dumps(list(self._hashes.values())).encode())}
        for blob_hash in self._hashes.values():
            for tensor in views(self._store.get(blob_hash)).values():
                flat = tensor.reshape(-1)
                if len(flat) >= FEW_NUMBERS and bool((flat != flat[0]).any()):
                    what = f"{tensor.dtype.str} {tensor.shape} ".encode()
                    found.add(sha256(what + flat.tobytes()))
        return found

    def numbers(self, key: str) -> Mapping[str, Numbers]:
        """Return the summands of one blob, by tensor name."""
        return self._convert(
            PlainBlob(
                key,
                lambda: self._store.get(self._hashes[key]),
                self.report,
                self._site.model.plan,
                self._site.settings,
            )
        )


def _require_own_entry(
    site: Site, header: Header, order: ShareOrder, advertised: Mapping[str, str]
) -> None:
    """Raise InputError if the list has other keys for this client than its own."""
    # A server that replaces this client's keys could read what others encrypt for it.
    place = order.clients.index(header.client)
    listed = (order.sites[place], order.mask_keys[place], order.share_keys[place])
    if listed != (site.name, advertised["mask_key"], advertised["share_key"]):
        raise InputError("shares: the server lists other keys for this client than its own")


def _require_enough(site: Site, kind: str, clients: int) -> None:
    """Raise InputError if a sum has fewer clients than the site's owner demands."""
    if clients < site.node.min_secure_sum:
        raise InputError(
            f"{kind}: a sum of {clients} clients; min-secure-sum = {site.node.min_secure_sum} at"
            " this site"
        )


def _require_same_sites(
    site: Site, header: Header, party: Party, included: Collection[int]
) -> None:
    """Raise InputError if this client's tensors were summed before, with other sites.

    Tensors that do not depend on text are the same in all runs, and show nothing of it.
    """
    if not site.settings.job.depends_on_text:
        return
    hashes = PlainReply(site, header).tensors_sha256()
    order = party.order
    names = dict(zip(order.clients, order.sites, strict=True))
    keep = header.kind == "unmask"
    require_same_sites(site, header.kind, hashes, [names[one] for one in included], keep=keep)


def _require_enough_noise(site: Site, order: ShareOrder, before: Collection[str]) -> None:
    """Raise InputError if sums of these sites could have too little shared noise for a record.

    All sums of a round are of the sites that were listed first, and of as many that two of them
    cannot both be unmasked. Their difference would have the noise of few sites.

    Parameters
    ----------
    before : sites of the first list of the round; empty if this is the first
    """
    fraction = site.settings.privacy.honest_fraction
    if not fraction:
        return
    # The share of each site is made for this number of sites.
    share = NoiseShare(site.settings.num_clients, fraction)
    if order.threshold < share.least_of_sum or len(order.clients) > share.clients:
        raise InputError(
            f"shares: a sum of {order.threshold} of {len(order.clients)} clients; with"
            f" privacy.honest-fraction = {fraction:g} it needs {share.least_of_sum} of num-clients"
            f" = {share.clients}, to have enough noise"
        )
    # Sums of different sites could be subtracted from each other.
    if before and (more := sorted(set(order.sites) - set(before))):
        raise InputError(
            f"shares: {', '.join(more)} was not among the sites that were listed first in this"
            " round; sums of other sites could be compared to remove shared noise; start a new run"
        )


def _require_known_sites(site: Site, header: Header, order: ShareOrder) -> None:
    """Raise InputError if keys of another site are not signed with its key (``peer-keys``)."""
    # Without keys the client can only warn.
    if not site.node.peer_keys:
        if not site.node.simulated:
            print(
                f"espalier: {site.name}: nothing shows that the keys of this secure sum are those"
                " of the other sites, because this site has no peer-keys; the server could read"
                " its tensors with keys of its own",
                file=sys.stderr,
                flush=True,
            )
        return
    peer_keys = public_keys(site.node.peer_keys, "peer-keys")
    for place, client in enumerate(order.clients):
        name = order.sites[place]
        # Its own keys were compared before.
        if client == header.client:
            continue
        if name not in peer_keys:
            raise InputError(
                f"shares: no key of site {name} is in this site's peer-keys; its owner must put"
                f" {name}.key.pub there"
            )
        keys = [order.mask_keys[place], order.share_keys[place]]
        # The signature covers run, round, session and client, so old keys cannot be replayed.
        text = key_statement(header.lineage, header.server_round, order.session, client, name, keys)
        if not is_signed(peer_keys[name], text, order.signatures[place]):
            raise InputError(f"shares: the keys of site {name} are not signed with its key")
