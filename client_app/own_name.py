"""A site says its name with its key, where the run's server has the sites' public keys.

Covers: what is signed is a statement of ours (``espalier.wire.signed_name``) with this site's own name and this node's id, and
nothing else, whatever a server sends. The key leaves neither the site nor this process.
Does not cover: another program in this process. ``flower-supernode`` runs what a run's submitter sends, which can read the key
and sign what it likes; ``espalier node`` runs the program that is installed here.
"""

from cryptography.hazmat.primitives.asymmetric import ec

from client_app.site import Site
from espalier.settings.mistakes import Mistake
from espalier.settings.site_keys import private_key
from espalier.wire.enrolment import Challenge, Enrolment, SignedEnrolment
from espalier.wire.messages import Letter, validate
from espalier.wire.signed_name import sign, statement


def own_key(site: Site) -> ec.EllipticCurvePrivateKey:
    """The site's private key.

    Raises
    ------
    Mistake
        It names none, or one that will not do.
    """
    if not site.node.site_key:
        raise Mistake(
            "site-key: sites of this run say their names with their keys (site-keys), and this one"
            " names none; give it its private key, with site-key in --node-config"
        )
    return private_key(site.node.site_key)


def said_with_key(
    site: Site, request: Letter, told: Enrolment, key: ec.EllipticCurvePrivateKey
) -> SignedEnrolment:
    """What the site says of itself, signed for this request alone."""
    nonce = validate(Challenge, request.scalars).nonce
    signature = sign(key, statement(told, nonce, request.header.lineage, site.node_id))
    return SignedEnrolment(**told.model_dump(), signature=signature)
