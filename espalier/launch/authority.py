"""Private certificate authority and server certificate, for TLS between a SuperLink and its sites.

Covers: the authority's certificate allows no intermediate authority (path length 0). A server
certificate is valid only for the given names and this machine's own, for a limited time, and only
for a server.
Does not cover: revocation. After a loss of ``server.key``, make a new authority and give its
``ca.crt`` to all sites.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from secrets import token_hex

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from espalier.errors import InputError

AUTHORITY_DAYS = 3650
SKEW = timedelta(hours=1)
"""Maximum time by which the sites' clocks may be slow."""
OWN_NAMES = ("localhost", "127.0.0.1")
"""Names by which the server's own processes reach it."""
HOST_NAME = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*"
    r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)
SIGNING = ("key_cert_sign", "crl_sign")
ALL_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def names_of_server(servers: Sequence[str]) -> list[x509.GeneralName]:
    """Return the host names and addresses for a server certificate, each once.

    InputError names those that are neither, for instance because of a scheme or a port.
    """
    names = list[x509.GeneralName]()
    wrong = list[str]()
    for name in dict.fromkeys([*servers, *OWN_NAMES]):
        try:
            names.append(x509.IPAddress(ip_address(name)))
        except ValueError:
            # A name whose last label is a number is a mistyped address, such as 10.0.0.
            if HOST_NAME.fullmatch(name) and not name.rpartition(".")[2].isdigit():
                names.append(x509.DNSName(name))
            else:
                wrong.append(
                    f"--server {name!r}: is not a host name or address; write it without scheme"
                    " and port"
                )
    if wrong:
        raise InputError("\n".join(wrong))
    return names


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key on the curve P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def new_authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return a self-signed authority certificate with a random name."""
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"Espalier authority {token_hex(4)}")]
    )
    limits = x509.BasicConstraints(ca=True, path_length=0)
    end = datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS)
    made = _certificate(name, name, key.public_key(), end).add_extension(limits, critical=True)
    return made.add_extension(_usage(*SIGNING), critical=True).sign(key, SHA384())


def new_server_certificate(
    key: ec.EllipticCurvePublicKey,
    names: Sequence[x509.GeneralName],
    days: int,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
) -> x509.Certificate:
    """Return a server certificate for these names.

    Raises InputError if it would be valid for longer than the authority's certificate.
    """
    issuer, signing_key = authority
    end = datetime.now(UTC) + timedelta(days=days)
    # The authority may have been made moments ago with the same lifetime, hence a day of tolerance.
    if end - timedelta(days=1) > issuer.not_valid_after_utc:
        raise InputError(
            f"--days {days}: the certificate of the authority expires on"
            f" {issuer.not_valid_after_utc:%Y-%m-%d}; give fewer days"
        )
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Espalier server")])
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key())
    builder = _certificate(name, issuer.subject, key, min(end, issuer.not_valid_after_utc))
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_usage("digital_signature"), critical=True)
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.add_extension(by, critical=False).sign(signing_key, SHA384())


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PKCS #8 PEM, which programs with TLS read."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_authority(
    certificate: bytes, key: bytes
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Load an existing authority.

    Raises InputError if a file is damaged or of another kind, or if key and certificate do not
    match.
    """
    try:
        read = x509.load_pem_x509_certificate(certificate)
        signing_key = load_pem_private_key(key, None)
    except (ValueError, TypeError):
        raise InputError(
            "ca: ca.crt or ca.key is damaged, or was not made by espalier keys; restore both"
            " from a backup"
        ) from None
    if (
        not isinstance(signing_key, ec.EllipticCurvePrivateKey)
        or read.public_key() != signing_key.public_key()
    ):
        raise InputError(
            "ca: ca.key is not the key of ca.crt; restore the key that belongs to ca.crt"
        )
    return read, signing_key


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(datetime.now(UTC) - SKEW).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in ALL_USES})
