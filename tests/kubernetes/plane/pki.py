"""The certificates of a control plane that lives for a test run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 7


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, as files."""

    certificate: Path
    private_key: Path


class Authority:
    """Signs certificates, which lie beside its own in one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._key = folder, new_key()
        self._subject = _subject(name, ())
        self._usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        own = self._builder(self._subject, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.own = write(folder, name, own.sign(self._key, hashes.SHA256()), self._key)

    def issue(
        self, file: str, common_name: str, *, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> Certificate:
        """For a client (`groups` are those of the user) or a server (`hosts` are its names and addresses)."""
        key = new_key()
        builder = self._builder(_subject(common_name, groups), key).add_extension(self._usages, critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        return write(self._folder, file, builder.sign(self._key, hashes.SHA256()), key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=DAYS))
        )


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh key of the curve that all parts accept."""
    return ec.generate_private_key(ec.SECP256R1())


def write(
    folder: Path, file: str, certificate: x509.Certificate | None, key: ec.EllipticCurvePrivateKey
) -> Certificate:
    """Writes `file`.crt (a bare public key when there is no certificate) and `file`.key."""
    public, private = folder / f"{file}.crt", folder / f"{file}.key"
    if certificate is None:
        data = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    else:
        data = certificate.public_bytes(serialization.Encoding.PEM)
    public.write_bytes(data)
    private.touch(mode=0o600)
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    return Certificate(public, private)


def _subject(common_name: str, groups: Sequence[str]) -> x509.Name:
    named = [(NameOID.COMMON_NAME, common_name), *((NameOID.ORGANIZATION_NAME, group) for group in groups)]
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in named])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)
