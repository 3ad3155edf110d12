"""Callers of the REST API whom the cluster knows: by its tokens, with its own rights on the resources behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from relight.controller.api.callers import Caller, Right, TokenCaller
from relight.controller.kubernetes.reviews import Asked, Reviews, User
from relight.core.auth import Identity, Tokens, bearer
from relight.core.errors import Denied

ASKED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class UserCaller:
    """A user or service account of the cluster."""

    user: User
    reviews: Reviews

    @property
    def identity(self) -> Identity:
        """Its roles are the cluster's own."""
        return Identity(self.user.name, frozenset())

    async def require(self, right: Right) -> None:
        """Raises Denied unless the cluster lets this user, Unavailable when it does not answer."""
        if not await self.reviews.may(self.user, asked(right)):
            raise Denied(f"{self.user.name} may not {told(right)}", authenticated=True)

    async def within(self, verb: str, namespaces: Iterable[str]) -> frozenset[str]:
        """Those of them in which this user may. Raises Unavailable."""
        wanted = frozenset(namespaces)
        if await self.reviews.may(self.user, asked(Right(verb))):
            return wanted
        at_once = asyncio.Semaphore(ASKED_AT_ONCE)

        async def may(namespace: str) -> bool:
            async with at_once:
                return await self.reviews.may(self.user, asked(Right(verb, namespace)))

        named = sorted(wanted - {""})
        answers = await asyncio.gather(*map(may, named))
        return frozenset(name for name, allowed in zip(named, answers, strict=True) if allowed)


class ClusterCallers:
    """Configured tokens first; every other one is asked of the cluster."""

    def __init__(self, tokens: Tokens, reviews: Reviews) -> None:
        self._tokens, self._reviews = tokens, reviews

    async def __call__(self, authorization: str | None) -> Caller:
        """Raises Denied for who is nobody's, Unavailable when the cluster does not answer."""
        token = bearer(authorization)
        try:
            return TokenCaller(self._tokens.identify(authorization))
        except Denied:
            return UserCaller(await self._reviews.user(token), self._reviews)


def asked(right: Right) -> Asked:
    """As an access review takes it."""
    named = {name: getattr(right, name) for name in ("namespace", "name", "subresource") if getattr(right, name)}
    return {"resourceAttributes": {"verb": right.verb, "group": right.group, "resource": right.resource, **named}}


def told(right: Right) -> str:
    """For people, as the API server says it."""
    resource = f"{right.resource}/{right.subresource}" if right.subresource else right.resource
    where = f"in namespace {right.namespace}" if right.namespace else "in all namespaces"
    return f"{right.verb} {resource} {where}"
