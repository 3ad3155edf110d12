"""Who calls, and what they may: by the roles of a configured token, or by what a cluster says of its users.

A right is named by the cluster's resource behind a route, so that both kinds of callers are asked the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar, cast

from fastapi import Depends, Request

from relight.core.auth import Identity, Role, Tokens
from relight.core.errors import Denied
from relight.core.tenants import tenant

READS = frozenset({"get", "list", "watch"})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Right:
    """One verb on one resource; without a namespace on those of all namespaces, without a name on all of them."""

    verb: str
    namespace: str = ""
    name: str = ""
    group: str = "relight.dev"
    resource: str = "modeldeployments"
    subresource: str = ""


class Caller(Protocol):
    """Somebody whose identity is known."""

    @property
    def identity(self) -> Identity:
        """As whom operations name them."""

    async def require(self, right: Right) -> None:
        """Raises Denied, or Unavailable when nobody can say."""

    async def within(self, verb: str, namespaces: Iterable[str]) -> frozenset[str]:
        """Those of `namespaces` in which they may do `verb` to models; empty names what is in none.

        Raises Denied for who may nowhere, whatever there is, and Unavailable when nobody can say.
        """


Callers = Callable[[str | None], Awaitable[Caller]]
"""The caller behind an `Authorization` header. Raises Denied, or Unavailable when nobody can say."""


@dataclass(frozen=True, slots=True)
class TokenCaller:
    """Whoever has a configured token: its roles hold in every namespace."""

    identity: Identity

    async def require(self, right: Right) -> None:
        """Raises Denied with the roles that would do."""
        self._require(right.verb)

    async def within(self, verb: str, namespaces: Iterable[str]) -> frozenset[str]:
        """All of them. Raises Denied with the roles that would do."""
        self._require(verb)
        return frozenset(namespaces)

    def _require(self, verb: str) -> None:
        roles = (Role.VIEWER, Role.OPERATOR) if verb in READS else (Role.OPERATOR,)
        if not self.identity.roles.intersection(roles):
            raise Denied(f"{self.identity.name} lacks the role {' or '.join(roles)}", authenticated=True)


def callers_by_token(tokens: Tokens) -> Callers:
    """Knows the configured tokens and no others."""

    async def known(authorization: str | None) -> Caller:
        return TokenCaller(tokens.identify(authorization))

    return known


def _caller(request: Request) -> Caller:
    return cast("Caller", request.state.caller)


def needs(verb: str, subresource: str = "") -> Callable[[Request], Awaitable[Identity]]:
    """Dependency: who may do `verb` to the model or the namespace in the path; in all where the path has none."""

    async def check(request: Request) -> Identity:
        path, caller = request.path_params, _caller(request)
        name = path.get("name", "") if "namespace" in path else ""
        await caller.require(Right(verb, path.get("namespace", ""), name, subresource=subresource))
        return caller.identity

    return check


Anybody = Annotated[Caller, Depends(_caller)]
"""For routes that show of everything what their caller may see: each asks `within`."""


async def only_seen(caller: Caller, found: Iterable[T], key: Callable[[T], str]) -> list[T]:
    """Of `found` what is in namespaces whose models the caller may list; `key` is of the form namespace/name."""
    listed = list(found)
    seen = await caller.within("list", {tenant(key(item)) for item in listed})
    return [item for item in listed if tenant(key(item)) in seen]
