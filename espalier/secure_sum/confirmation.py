"""Codes by which clients confirm to each other that they have the same list of a sum's clients.

A client unmasks only a list of clients that it confirmed itself, once in a session, and that at
least the threshold of clients confirmed to it (consistency check of Bonawitz et al. 2017, figure 4,
round 3). The codes are HMAC with SHA-256 (RFC 2104). Their keys follow from the keys by which the
two clients encrypt shares.

Covers: a server that gives clients different lists. Of n clients let c work with the server, and
let t be the threshold. Of two lists that t clients each confirmed, at least 2t - n clients
confirmed both, which is more than c if 2t > n + c. One of them is honest, and confirms one list
only. So all honest clients that unmask anything unmask the same list, no client loses both of its
secrets, and the sum has at least t - c honest clients.

Does not cover: a server with keys of its own in place of those of sites, which can make codes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from espalier.secure_sum.keys import Route, Session, agreed

LIST_TAG_BYTES = 32
"""Size of a code."""


@dataclass(frozen=True)
class ListOfSum:
    """List of the clients of a secure sum that one client received."""

    members: Sequence[int]
    """Clients that sent shares."""
    included: Sequence[int]
    """Clients whose masked summands are in the sum."""

    def tag(self, key: X25519PrivateKey, other: str, session: Session, route: Route) -> str:
        """Return the code of the sender of ``route`` for its receiver, hexadecimal.

        Parameters
        ----------
        key : private key of the client at one end
        other : public key of the client at the other end, hexadecimal
        """
        return self._code(key, other, session, route).finalize().hex()

    def is_confirmed(
        self, key: X25519PrivateKey, other: str, session: Session, route: Route, tag: str
    ) -> bool:
        """Return whether a code is that of the sender of ``route`` for this list."""
        try:
            self._code(key, other, session, route).verify(bytes.fromhex(tag))
        except InvalidSignature:
            return False
        return True

    def _code(self, key: X25519PrivateKey, other: str, session: Session, route: Route) -> HMAC:
        info = session.info("list of the sum", route.sender, route.receiver)
        # Bound to the session, the direction and the list of keys.
        code = HMAC(agreed(key, other, info), SHA256())
        # Both lists are covered: who sent shares, and who is in the sum.
        document = [route.list_sha256, list(self.members), list(self.included)]
        code.update(json.dumps(document).encode())
        return code
