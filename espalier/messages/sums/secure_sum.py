"""Contracts of secure sums: keys, shares, masked summands, and shares of what to unmask.

The reply to a ``train`` has no tensors but two public keys (``train_contract``). Four exchanges
follow (Bonawitz et al. 2017, figure 4): ``shares`` (everybody's keys down, encrypted shares of two
secrets up), ``masked`` (the shares of the others down, masked summands up, in parts), ``confirm``
(who is in the sum down, a tag for each other client in it up), and ``unmask`` (the tags of the
others down, the own mask's seed and one kind of share for each client up).

Covers: lengths, order and number of all values; a request for both secrets of a client is invalid.
Does not cover: what requests say together; the client compares them with each other
(``client_app.protocol.secure_sum``).
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, create_model

from espalier.errors import ProtocolError
from espalier.messages.contract import Contract, Side
from espalier.messages.enrolment import MAX_SIGNATURE
from espalier.messages.message import Fields, Kind, MessageBody, NoFields
from espalier.messages.parts import Report, Sha256, parts_of
from espalier.messages.sums.masked_summands import tensor_specs_of
from espalier.messages.sums.summands import SumSpecs, has_clean_padding
from espalier.messages.tensor_blobs import views
from espalier.models.plan import ModelPlan, PlanOf
from espalier.secure_sum.confirmation import LIST_TAG_BYTES
from espalier.secure_sum.keys import SEALED_BYTES, SEED_BYTES
from espalier.secure_sum.neighbours import Neighbourhood, neighbourhood, two_thirds
from espalier.settings.combinations import MAX_SUM_CLIENTS, MIN_SUM_CLIENTS
from espalier.settings.registry import METHODS
from espalier.settings.run import RunSettings

LABEL = b"espalier: a site says its keys of a secure sum (1)\n"
"""Label of the statement that a site signs, with the version of its form."""

Number = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Random number of a session, hexadecimal."""
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""X25519 public key, hexadecimal."""
Signature = Annotated[str, Field(max_length=MAX_SIGNATURE, pattern=r"^([0-9a-f]{2})*$")]
"""Signature by a site's key, hexadecimal; empty without a key."""
Sealed = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SEALED_BYTES}}}$")]
"""Encrypted pair of shares, hexadecimal."""
Share = Annotated[str, Field(pattern=rf"^([0-9a-f]{{{2 * SEED_BYTES}}})?$")]
"""Share of a secret, hexadecimal; empty if its holder could not read it."""
Seed = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SEED_BYTES}}}$")]
"""Seed of a client's own mask, hexadecimal."""
Tag = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * LIST_TAG_BYTES}}}$")]
"""Authentication code of a list of clients, hexadecimal."""
ClientNumber = Annotated[int, Field(ge=0)]


SESSION = "session"
"""Name of the field of ``SessionOrder``."""


class SessionOrder(Fields):
    """Field that every request of a sum has."""

    session: Number
    """Random number of this attempt at the sum."""


class Advertised(Report):
    """Reply to a ``train``: the report of the work, and public keys instead of tensors."""

    # A hash of tensors would let an observer confirm a guess at them.
    blob_sha256: list[Sha256] = Field(max_length=0)
    """Empty: the plain tensors stay at the site."""
    mask_key: PublicKey
    """Key from which the common mask with each neighbour follows."""
    share_key: PublicKey
    """Key for which shares of the others' secrets are encrypted."""
    signature: Signature = ""
    """Signature of both keys by the site's key."""


KEY_FIELDS = ("mask_key", "share_key", "signature")
"""Fields of ``Advertised`` that are not those of a report."""


def report_of(advertised: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the method's own report in a reply with keys."""
    return {name: value for name, value in advertised.items() if name not in KEY_FIELDS}


class ShareOrder(SessionOrder):
    """Request for shares: the keys of all clients of the sum, in ascending order."""

    threshold: int
    """Number of clients that the sum needs."""
    clients: list[ClientNumber]
    sites: list[Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]]
    """Name of each client's site."""
    mask_keys: list[PublicKey]
    share_keys: list[PublicKey]
    signatures: list[Signature]

    @property
    def neighbourhood(self) -> Neighbourhood:
        """Degree and threshold of the graph of neighbours."""
        return neighbourhood(len(self.clients), self.threshold)

    def list_sha256(self, inputs_sha256: str) -> str:
        """Return the SHA-256, hexadecimal, of what all clients of the sum must have in common.

        It covers the list, the threshold, and what each client's tensors are made of, apart from
        its own data.
        """
        document = [self.threshold, self.clients, self.sites, self.mask_keys, self.share_keys]
        return sha256(json.dumps([*document, inputs_sha256]).encode()).hexdigest()

    def keys(self) -> dict[int, str]:
        """Return both public keys of each client as one text."""
        pairs = zip(self.clients, self.mask_keys, self.share_keys, strict=True)
        return {client: f"{mask} {share}" for client, mask, share in pairs}


class Shares(Fields):
    """Reply with shares of the client's two secrets, for the holders in ascending order."""

    shares: list[Sealed]
    """Encrypted shares for each neighbour."""
    seed_sha256: list[Sha256]
    """Hash of each holder's share of the seed of the client's own mask; itself holds one too."""
    key_sha256: list[Sha256]
    """Hash of each holder's share of the seed of the client's mask key."""
    own_sha256: Sha256
    """Hash of the seed of the client's own mask, by which the server checks what it rebuilt."""


class MaskOrder(SessionOrder):
    """Request for the first part of the masked summands."""

    members: list[ClientNumber]
    """Clients that sent shares, with which masks are shared."""
    sources: list[ClientNumber]
    """Neighbours among them, whose shares follow in this order."""
    shares: list[Sealed]
    seed_sha256: list[Sha256]
    key_sha256: list[Sha256]


class Masked(Fields):
    """Fields of the first part of the masked summands."""

    unreadable: list[ClientNumber]
    """Neighbours whose shares cannot be decrypted, or are not those that they published."""


class ConfirmOrder(SessionOrder):
    """Request to confirm to the others which clients are in the sum."""

    included: list[ClientNumber]
    """Clients whose masked summands are in the sum."""


class Confirmed(Fields):
    """Reply with a tag of the list for each other client in it, which that client can verify."""

    tags: list[Tag]


class UnmaskOrder(SessionOrder):
    """Request for the secrets by which the server removes masks from the sum."""

    included: list[ClientNumber]
    """Clients whose masked summands are in the sum."""
    seeds_of: list[ClientNumber]
    """Those of them whose shares the receiver holds: it sends shares of their seeds."""
    keys_of: list[ClientNumber]
    """Neighbours that are not in the sum: it sends shares of their mask keys."""
    confirmed: list[ClientNumber]
    """Other clients that confirmed the same list."""
    tags: list[Tag]
    """Tag of each of them for the receiver."""


class Unmask(Fields):
    """Reply with one secret of the client, and one share for each client that the request names."""

    own_seed: Seed
    """Seed of the client's own mask."""
    seeds: list[Share]
    keys: list[Share]


KINDS: tuple[Kind, ...] = ("shares", "masked", "confirm", "unmask")
"""Kinds of the four exchanges after ``train``, in order."""


def key_statement(
    lineage: str, server_round: int, session: str, client: int, site: str, keys: Sequence[str]
) -> bytes:
    """Return the bytes that a site signs: its two public keys, and what they are for."""
    document = [lineage, server_round, session, client, site, *keys]
    return LABEL + json.dumps(document).encode()


def summand_specs(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of the summands of a round, by blob key and tensor name."""
    make_specs = METHODS[run.method].summands
    if make_specs is None:
        raise ProtocolError(f"message: replies of {run.method} are not summed")
    specs: SumSpecs = make_specs(server_round, plan, run)
    return specs


def train_contract(plain: Contract) -> Contract:
    """Return the contract of a ``train`` whose tensors stay at the site, from the plain one."""
    down = Side(
        _with(plain.down.fields, SessionOrder),
        plain.down.blobs,
        plain.down.check_values,
        plain.down.check_fields,
        plain.down.blob_sha256,
    )
    up = Side(_with(plain.up.fields, Advertised), check_fields=plain.up.check_fields)
    return Contract("train", plain.method, down, up, ADVERTISED)


@lru_cache(maxsize=64)
def _with(fields: type[Fields], extra_fields: type[Fields]) -> type[Fields]:
    """Return a description with the fields of both; those of ``extra_fields`` take precedence."""
    bases = extra_fields if issubclass(extra_fields, fields) else (extra_fields, fields)
    return create_model(f"{extra_fields.__name__}{fields.__name__}", __base__=bases)


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of one of the four exchanges.

    Raises ProtocolError if the run has no secure sums, or the message has no such part.
    """
    header = request.header
    if not run.federation.secure_sum:
        raise ProtocolError(f"message: a {header.kind} needs federation.secure-sum")
    if header.kind == "masked":
        return _masked_contract(request, plan_of, run)
    if header.part:
        raise ProtocolError(f"message: a {header.kind} has one part")
    if header.kind == "shares":
        down = Side(ShareOrder, check_fields=lambda order: _check_keys(order, header.client))
        up = Side(Shares, check_fields=lambda report: _check_shares(report, request))
        return Contract("shares", run.method, down, up, SHARED)
    if header.kind == "confirm":
        down = Side(ConfirmOrder, check_fields=lambda order: _check_list(order, header.client))
        up = Side(Confirmed, check_fields=lambda report: _check_confirmed(report, request))
        return Contract("confirm", run.method, down, up, CONFIRMED)
    down = Side(UnmaskOrder, check_fields=lambda order: _check_unmasking(order, header.client))
    up = Side(Unmask, check_fields=lambda report: _check_unmasked(report, request))
    return Contract("unmask", run.method, down, up, UNMASKED)


def _masked_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    part = request.header.part
    sums = summand_specs(request.header.server_round, plan_of(), run)
    tensors = tensor_specs_of(sums)
    parts = parts_of(tensors, run.part_bytes)
    if part >= len(parts):
        raise ProtocolError(
            f"message: part {part} of a masked does not exist, a reply has {len(parts)}"
        )

    def check_values(key: str, blob: bytes) -> None:
        for name, words in views(blob).items():
            if not has_clean_padding(words, sums[key][name]):
                raise ProtocolError(f"{key} {name}: bits are set beyond the last number")

    down = Side(SessionOrder) if part else Side(MaskOrder, check_fields=_check_members)
    up = Side(
        NoFields if part else Masked,
        {key: tensors[key] for key in parts[part]},
        check_values,
        None if part else lambda report: _check_unreadable(report, request),
    )
    return Contract("masked", run.method, down, up, MASKED, parts)


def _check_keys(order: Any, client: int) -> None:
    """Check the keys of a sum: one entry per client, all keys different, enough clients."""
    clients = order.clients
    keys = [*order.mask_keys, *order.share_keys]
    lists = (order.sites, order.mask_keys, order.share_keys, order.signatures)
    if any(len(values) != len(clients) for values in lists):
        raise ProtocolError("ShareOrder: the lists have different lengths")
    if not _ascend(clients) or client not in clients:
        raise ProtocolError("ShareOrder: clients must ascend, and the receiver must be one of them")
    if len(set(order.sites)) != len(clients) or len(set(keys)) != len(keys):
        raise ProtocolError("ShareOrder: two clients have one site, or one key")
    if not MIN_SUM_CLIENTS <= len(clients) <= MAX_SUM_CLIENTS:
        raise ProtocolError(
            f"ShareOrder: {len(clients)} clients, a sum needs"
            f" {MIN_SUM_CLIENTS} to {MAX_SUM_CLIENTS}"
        )
    if not two_thirds(len(clients)) <= order.threshold <= len(clients):
        raise ProtocolError(
            f"ShareOrder: a threshold of {order.threshold} of {len(clients)} clients; it must be"
            " more than two thirds of them"
        )


def _check_shares(report: Any, request: MessageBody) -> None:
    clients = len(request.fields["clients"])
    degree = neighbourhood(clients, request.fields["threshold"]).degree
    lengths = (len(report.shares), len(report.seed_sha256), len(report.key_sha256))
    if lengths != (degree, degree + 1, degree + 1):
        raise ProtocolError(f"Shares: must be {degree} shares, and a hash for each holder")


def _check_members(order: Any) -> None:
    if not _ascend(order.members) or not _ascend(order.sources):
        raise ProtocolError("MaskOrder: clients must ascend")
    if not set(order.sources) <= set(order.members):
        raise ProtocolError("MaskOrder: a source is not a member")
    for values in (order.shares, order.seed_sha256, order.key_sha256):
        if len(values) != len(order.sources):
            raise ProtocolError("MaskOrder: the lists have different lengths")


def _check_unreadable(report: Any, request: MessageBody) -> None:
    if not _ascend(report.unreadable) or not set(report.unreadable) <= set(
        request.fields["sources"]
    ):
        raise ProtocolError("Masked: unreadable names other clients than the sources")


def _check_list(order: Any, client: int) -> None:
    if not _ascend(order.included) or client not in order.included:
        raise ProtocolError(
            "ConfirmOrder: clients must ascend, and the receiver must be one of them"
        )


def _check_confirmed(report: Any, request: MessageBody) -> None:
    others = len(request.fields["included"]) - 1
    if len(report.tags) != others:
        raise ProtocolError(f"Confirmed: must be {others} tags, one for each other client")


def _check_unmasking(order: Any, client: int) -> None:
    lists = (order.included, order.seeds_of, order.keys_of, order.confirmed)
    if not all(map(_ascend, lists)):
        raise ProtocolError("UnmaskOrder: clients must ascend")
    if len(order.confirmed) != len(order.tags):
        raise ProtocolError("UnmaskOrder: the lists have different lengths")
    if not set(order.confirmed) <= set(order.included) - {client}:
        raise ProtocolError("UnmaskOrder: a confirmation is not of another client in the sum")
    included = set(order.included)
    if not set(order.seeds_of) <= included or set(order.keys_of) & included:
        raise ProtocolError(
            "UnmaskOrder: asks for the seed of a client that is not in the sum, or for the key of"
            " one that is"
        )
    if client not in included:
        raise ProtocolError("UnmaskOrder: the receiver is not in the sum")


def _check_unmasked(report: Any, request: MessageBody) -> None:
    expected = (len(request.fields["seeds_of"]), len(request.fields["keys_of"]))
    if (len(report.seeds), len(report.keys)) != expected:
        raise ProtocolError("Unmask: must have one share for each client of the request")


def _ascend(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def sized_fields(request: MessageBody) -> dict[str, Any]:
    """Return fields of a reply with the lengths of real ones, for the estimate of a run's bytes.

    Signatures are left out: their length depends on the site's key.
    """
    kind = request.header.kind
    fields: Mapping[str, Any] = request.fields
    if kind == "train":
        key = "0" * 64
        return {"blob_sha256": [], "mask_key": key, "share_key": key, "signature": ""}
    if kind == "shares":
        degree = neighbourhood(len(fields["clients"]), fields["threshold"]).degree
        hashes = ["0" * 64] * (degree + 1)
        sealed = ["0" * 2 * SEALED_BYTES] * degree
        share_fields = {"shares": sealed, "seed_sha256": hashes, "key_sha256": hashes}
        return {**share_fields, "own_sha256": "0" * 64}
    if kind == "masked":
        return {"unreadable": []}
    if kind == "confirm":
        return {"tags": ["0" * 2 * LIST_TAG_BYTES] * (len(fields["included"]) - 1)}
    share = "0" * 2 * SEED_BYTES
    return {
        "own_seed": share,
        "seeds": [share] * len(fields["seeds_of"]),
        "keys": [share] * len(fields["keys_of"]),
    }


ADVERTISED = (
    "What the method reports with its reply, without weights of the client: how long the work took,"
    " and of adapters how many steps failed and their rank. Random public keys of this round. With"
    " `federation.secure-sum` the tensors stay at the site until they are masked."
)
SHARED = (
    "Encrypted shares of random secrets, which their receivers can read and nobody else, and hashes"
    " of them. Nothing about the client's data."
)
MASKED = (
    "Numbers that are uniform and independent of the client's data for everybody who lacks the"
    " masks. The server learns the sum of all clients' tensors, and what follows from it."
)
CONFIRMED = (
    "For each other client in the sum a code by which it verifies that this client was given the"
    " same list of the clients in the sum. Nothing about the client's data."
)
UNMASKED = (
    "The seed of this client's own mask of this round, and shares of random secrets of the round:"
    " of the own mask of clients in the sum, and of the mask key of clients that dropped out."
    " Together with those of other clients they unmask the sum and nothing else."
)
