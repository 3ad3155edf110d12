"""Who may seal a bundle: Ed25519 keys. A bundle holds code that engines run, so only what a known key signed is
used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from relight.core.errors import Denied, InvalidInput

CONTEXT = b"relight compile bundle 1\n"
"""Signed in front of each manifest, so that a signature made for anything else never fits one."""
SIGNATURE_BYTES = 64


def _raw(public: Ed25519PublicKey) -> bytes:
    return public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _name(public: Ed25519PublicKey) -> str:
    return hashlib.sha256(_raw(public)).hexdigest()[:16]


class Signer:
    """One node's private key. `name` is what its signatures are found by: 16 hexadecimal digits."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.name = _name(private.public_key())

    @classmethod
    def new(cls) -> Signer:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Signer:
        """The key in a PEM file. Raises InvalidInput naming the file, never its content."""
        try:
            private = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidInput(f"{path} holds no private key that can be read: {type(error).__name__}") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise InvalidInput(f"{path} holds another kind of key than Ed25519")
        return cls(private)

    def save(self, path: Path) -> None:
        """Writes the private key, readable by its owner alone. Raises OSError, also where a file is already."""
        data = self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(data)

    def sign(self, manifest: bytes) -> bytes:
        """64 bytes."""
        return self._private.sign(CONTEXT + manifest)

    @property
    def public(self) -> str:
        """The public key, 64 hexadecimal digits: what others put on their list."""
        return _raw(self._private.public_key()).hex()


class Trust:
    """The public keys whose bundles are used here."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys` are hexadecimal. Raises InvalidInput for one that is no Ed25519 key."""
        self._keys: dict[str, Ed25519PublicKey] = {}
        for text in keys:
            try:
                public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
            except ValueError:
                raise InvalidInput(f"a public key has 64 hexadecimal digits, got {text[:80]!r}") from None
            self._keys[_name(public)] = public

    @property
    def keys(self) -> frozenset[str]:
        """The names of those who are trusted."""
        return frozenset(self._keys)

    def check(self, manifest: bytes, signer: str, signature: bytes) -> None:
        """Raises Denied when a manifest is unsigned, signed by somebody unknown, or was altered since."""
        if not signature or not signer:
            raise Denied("the bundle is unsigned")
        known = self._keys.get(signer)
        if known is None:
            raise Denied(f"the bundle was signed by {signer[:32]!r}, who is not trusted here")
        try:
            known.verify(signature, CONTEXT + manifest)
        except InvalidSignature:
            raise Denied(f"the bundle's manifest is not what {signer} signed: it was altered") from None
