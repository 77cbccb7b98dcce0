"""Certificates of a private authority. The only door to x509 of `cryptography`.

All keys are on P-256. A device's certificate is for clients only, so that no device can
pass for the broker, and the broker's for servers only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgetrain.errors import ConfigError

AUTHORITY_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 825

# A device whose clock is a little behind must not find its own certificate too young.
_SKEW: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.certificate).serial_number


def make_authority(name: str, now: datetime, days: int = AUTHORITY_DAYS) -> Credentials:
    """A certificate authority of its own, that signs for parties and no other authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(name)
    public = key.public_key()
    builder = (
        _builder(subject, subject, public, (now, days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_others=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return _signed(builder, key, key)


def issue_device(
    authority: Credentials, name: str, now: datetime, days: int = CERTIFICATE_DAYS
) -> Credentials:
    """A client's certificate; the broker takes its common name for the user's name."""
    return _issue(authority, name, (now, days), ExtendedKeyUsageOID.CLIENT_AUTH)


def issue_broker(
    authority: Credentials,
    hosts: Sequence[str],
    now: datetime,
    days: int = CERTIFICATE_DAYS,
) -> Credentials:
    """A server's certificate for all the names and addresses it is reached at."""
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    return _issue(authority, "broker", (now, days), ExtendedKeyUsageOID.SERVER_AUTH, names)


def revocation_list(
    authority: Credentials,
    revoked: Mapping[int, datetime],
    now: datetime,
    previous: bytes | None = None,
) -> bytes:
    """The list of serial numbers that no longer count, as PEM.

    It holds as long as an authority does: a list that ran out would shut everyone out. It
    is dated after the previous one, by a second at least: a broker that reads it beside
    that one goes by the later.
    """
    date = now - _SKEW
    if previous is not None:
        last = x509.load_pem_x509_crl(previous).last_update_utc
        date = max(date, last + timedelta(seconds=1))
    certificate = x509.load_pem_x509_certificate(authority.certificate)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(certificate.subject)
        .last_update(date)
        .next_update(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(_issuer_identifier(certificate), critical=False)
        .add_extension(x509.CRLNumber(int(date.timestamp())), critical=False)
    )
    for serial, revoked_at in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial)
        builder = builder.add_revoked_certificate(entry.revocation_date(revoked_at).build())
    return builder.sign(_private_key(authority), hashes.SHA256()).public_bytes(Encoding.PEM)


def expiry(certificate: bytes) -> datetime:
    """When a certificate ends."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def _issue(
    authority: Credentials,
    name: str,
    period: tuple[datetime, int],
    purpose: x509.ObjectIdentifier,
    names: x509.SubjectAlternativeName | None = None,
) -> Credentials:
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    builder = (
        _builder(_subject(name), issuer.subject, public, period)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_others=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(_issuer_identifier(issuer), critical=False)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return _signed(builder, key, _private_key(authority))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    period: tuple[datetime, int],
) -> x509.CertificateBuilder:
    now, days = period
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _signed(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> Credentials:
    certificate = builder.sign(issuer_key, hashes.SHA256())
    return Credentials(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _private_key(authority: Credentials) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(authority.key, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the authority's key is not one that `edgetrain fleet init` made")
    return key


def _issuer_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    extension = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(extension.value)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_others: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_others,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_others,
        crl_sign=signs_others,
        encipher_only=False,
        decipher_only=False,
    )
