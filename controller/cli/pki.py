"""A fleet's own certificate authority, and one certificate for each component, of the names by which it is reached."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from relight.core.clock import Clock

LIFETIME_DAYS = 3650
AUTHORITY = "relight"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _reached(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def make(
    directory: Path, components: tuple[str, ...], clock: Clock, hosts: Mapping[str, tuple[str, ...]] | None = None
) -> None:
    """Writes ca.pem, and NAME.pem with NAME.key for each component, valid for its name, loopback, and its `hosts`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    begin = datetime.datetime.fromtimestamp(clock.now(), datetime.UTC) - datetime.timedelta(hours=1)
    end = begin + datetime.timedelta(days=LIFETIME_DAYS)
    authority = ec.generate_private_key(ec.SECP256R1())

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(AUTHORITY))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
        )

    root = (
        builder(AUTHORITY, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
                key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
        .sign(authority, hashes.SHA256())
    )  # fmt: skip
    # The authority's own key is not kept: nothing else is ever signed by it.
    (directory / "ca.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    for component in components:
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName("localhost"),
                x509.DNSName(component),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                *map(_reached, (hosts or {}).get(component, ())),
            ]
        )
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            builder(component, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .add_extension(both, critical=False)
            .sign(authority, hashes.SHA256())
        )
        (directory / f"{component}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _private(directory / f"{component}.key", key)
