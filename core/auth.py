"""Bearer tokens and the roles that they carry.

A token is stored only as its SHA-256, compared in constant time, and never logged. Roles are not
ordered: each route names the roles that it admits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from relight.core.errors import Denied


class Role(StrEnum):
    """What an identity may do."""

    VIEWER = "viewer"
    """Read models, instances, operations, events."""
    OPERATOR = "operator"
    """What a viewer may, and change models, scale, pin requests."""
    AGENT = "agent"
    """Attach as a slot."""
    GATEWAY = "gateway"
    """Attach as a gateway."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is calling."""

    name: str
    roles: frozenset[Role]


ANONYMOUS = Identity("anonymous", frozenset())


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One known token: the hexadecimal SHA-256 of it, and the identity it stands for."""

    sha256: str
    identity: Identity


def hash_token(token: str) -> str:
    """The hexadecimal SHA-256 under which a token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A fresh token of 256 random bits."""
    return "rlt_" + secrets.token_urlsafe(32)


def bearer(authorization: str | None) -> str:
    """The token of an `Authorization: Bearer ...` value. Raises Denied when there is none."""
    if not authorization:
        raise Denied("no identity: send `Authorization: Bearer <token>`")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Denied("the Authorization header must read `Bearer <token>`")
    return token.strip()


class Tokens:
    """The tokens that a component accepts."""

    def __init__(self, entries: Iterable[TokenEntry]) -> None:
        self._entries = tuple(entries)

    def identify(self, authorization: str | None) -> Identity:
        """The identity behind an `Authorization: Bearer ...` value. Raises Denied when there is none."""
        wanted = hash_token(bearer(authorization))
        found = ANONYMOUS
        for entry in self._entries:
            # No early exit: the time must not tell which entry matched.
            if hmac.compare_digest(entry.sha256, wanted):
                found = entry.identity
        if found is ANONYMOUS:
            raise Denied("the token is not known here")
        return found

    def also(self, entry: TokenEntry) -> Tokens:
        """These, and one more."""
        return Tokens((*self._entries, entry))

    def require(self, authorization: str | None, *roles: Role) -> Identity:
        """The identity, if it has one of `roles`. Raises Denied with the roles that would do."""
        identity = self.identify(authorization)
        if not identity.roles.intersection(roles):
            wanted = " or ".join(roles)
            raise Denied(f"{identity.name} lacks the role {wanted}", authenticated=True)
        return identity
