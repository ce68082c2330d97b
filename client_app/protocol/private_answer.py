"""Answers of private runs: each draws on the site's privacy budget before work on data begins.

Covers: an answer is computed once with one noise. The same request is answered from the stored
reply, byte for byte. If the work failed before a reply was stored, it is repeated with new noise
and no second draw, since nothing left the site. If a stored reply is lost, the request is refused.
Noise is never made again from a key: the same noise on data that changed in between would reveal
the difference. The duration of the work does not leave the site as a number.

Does not cover: the time at which a reply arrives, from which the server can guess how much was
computed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from client_app.protocol.answer_once import answer_once
from client_app.site import Site
from espalier.errors import InputError
from espalier.messages.message import Fields, Header, MessageBody
from espalier.privacy.budget import Budget
from espalier.privacy.guarantee import Guarantee, guarantee_of
from espalier.privacy.noise import RandomBits, SecureBits, SeededBits
from espalier.storage.client_state import PrivateState

NO_SECONDS = 0.0
"""Duration that a private reply reports."""
Begin = Callable[[], RandomBits]
"""Function that draws on the budget and returns the source of noise.

It is called once, after all checks that do not need noise.
"""


def budget_of(site: Site) -> Budget:
    """Return the privacy budget of a site."""
    node = site.node
    return Budget(node.state_root(), site.name, node.max_epsilon, node.delta)


def answer_privately(
    site: Site,
    request: MessageBody,
    work: Callable[[PrivateState, Guarantee, Begin], Fields],
    rests_on: Callable[[PrivateState], Mapping[str, Any]] = lambda _: {},
) -> MessageBody:
    """Answer a ``train`` request of a private run; see ``answer_once``.

    Raises InputError if the answer would exceed the site's budget, or its stored reply is lost.
    """
    header = request.header
    guarantee = guarantee_of(site.settings)
    assert guarantee is not None
    budget = budget_of(site)

    def begin() -> RandomBits:
        # Drawn first: work that fails afterwards has spent its budget.
        budget.draw(header.lineage, header.server_round, guarantee)
        return random_bits(site, header)

    reply = answer_once(site, request, lambda state: work(state, guarantee, begin), rests_on)
    # From here on a repetition without stored reply is refused.
    budget.note_answered(header.lineage, header.server_round)
    return reply


def random_bits(site: Site, header: Header) -> RandomBits:
    """Return the source of noise and sampling of an answer.

    Raises InputError if the run asks a real site for noise from the run's seed.
    """
    settings = site.settings
    # Secure noise comes from the operating system and cannot be repeated.
    if settings.privacy.noise == "secure":
        return SecureBits()
    if not site.node.simulated:
        raise InputError(SEED_IS_KNOWN)
    return SeededBits(settings.seed, header.client, header.server_round)


SEED_IS_KNOWN = (
    "privacy.noise = 'seed': everybody who knows the run's seed could subtract the noise; only"
    " simulated clients accept it; set it to 'secure'"
)
"""Refusal of a real site."""
