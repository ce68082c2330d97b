"""Signature of a site's name, for runs whose server has the public keys of the sites.

Covers: the site signs only our own statement (``espalier.messages.signed_name``) with its own name
and its node id, whatever a server sends. The key leaves neither the site nor this process.

Does not cover: other code in this process. ``flower-supernode`` runs the code that a run's
submitter sends, which can read the key and sign anything. ``espalier node`` runs only the program
installed here.
"""

from cryptography.hazmat.primitives.asymmetric import ec

from client_app.site import Site
from espalier.errors import InputError
from espalier.identity.site_keys import private_key
from espalier.messages.enrolment import Challenge, Enrolment, SignedEnrolment
from espalier.messages.message import MessageBody, validate
from espalier.messages.signed_name import sign, statement


def own_key(site: Site) -> ec.EllipticCurvePrivateKey:
    """Return the site's private key; raise InputError if there is none, or an unusable one."""
    if not site.node.site_key:
        raise InputError(
            "site-key: sites of this run prove their names with keys (site-keys), but this site"
            " has no key; set site-key in --node-config to its private key"
        )
    return private_key(site.node.site_key)


def signed_enrolment(
    site: Site, request: MessageBody, enrolment: Enrolment, key: ec.EllipticCurvePrivateKey
) -> SignedEnrolment:
    """Return the enrolment with a signature that is valid for this request only."""
    # Only this server's question is signed, for this run and node.
    nonce = validate(Challenge, request.fields).nonce
    signature = sign(key, statement(enrolment, nonce, request.header.lineage, site.node_id))
    return SignedEnrolment(**enrolment.model_dump(), signature=signature)
