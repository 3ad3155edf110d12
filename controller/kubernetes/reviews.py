"""Who a token is of, and what they may: asked of the API server, whose answers are remembered for seconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from relight.controller.kubernetes.api import Api, Kind, Object
from relight.core.clock import Clock
from relight.core.errors import Denied, InvalidInput, NotFound, Unavailable
from relight.core.logs import get_logger

TOKEN_REVIEW = Kind("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
ACCESS_REVIEW = Kind("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False)
YES_SECONDS, NO_SECONDS = 10.0, 5.0
REMEMBERED = 1024
"""Answers of each kind; with more, the oldest are forgotten."""

K = TypeVar("K")
V = TypeVar("V")
Asked = Mapping[str, Mapping[str, str]]
"""`resourceAttributes` or `nonResourceAttributes`, as an access review takes them."""

log = get_logger("controller.kubernetes.reviews")


@dataclass(frozen=True, slots=True)
class User:
    """Who asks, as the API server names people and accounts."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def told(self, name: str) -> str:
        """The first value of an extra; empty where there is none."""
        return next((values[0] for key, values in self.extra if key == name and values), "")


@dataclass
class _Remembered(Generic[K, V]):
    clock: Clock
    known: dict[K, tuple[V, float]] = field(default_factory=dict)

    def get(self, key: K) -> V | None:
        found = self.known.get(key)
        return None if found is None or found[1] <= self.clock.monotonic() else found[0]

    def put(self, key: K, value: V, seconds: float) -> None:
        self.known.pop(key, None)
        while len(self.known) >= REMEMBERED:
            self.known.pop(next(iter(self.known)))
        self.known[key] = (value, self.clock.monotonic() + seconds)


class Reviews:
    """Asks the API server, and never answers for it: where it is away, nobody is let in."""

    def __init__(self, api: Api, clock: Clock) -> None:
        self._api = api
        # A tuple, so that a token that is nobody's is remembered too: None inside.
        self._users: _Remembered[tuple[str, str], tuple[User | None]] = _Remembered(clock)
        self._rights: _Remembered[tuple[User, str], bool] = _Remembered(clock)

    async def user(self, token: str, audience: str = "") -> User:
        """Whose token it is; with `audience`, only if it was made for that one. Raises Denied, Unavailable."""
        key = (hashlib.sha256(token.encode()).hexdigest(), audience)
        known = self._users.get(key)
        if known is None:
            spec: dict[str, Any] = {"token": token, **({"audiences": [audience]} if audience else {})}
            known = (_reviewed(await self._ask(TOKEN_REVIEW, spec), audience),)
            self._users.put(key, known, YES_SECONDS if known[0] else NO_SECONDS)
        if known[0] is None:
            raise Denied(f"the token is none of this cluster{f' for {audience}' if audience else ''}")
        return known[0]

    async def may(self, user: User, asked: Asked) -> bool:
        """Whether `user` may. Raises Unavailable when nobody can say."""
        key = (user, json.dumps(asked, sort_keys=True))
        allowed = self._rights.get(key)
        if allowed is None:
            spec: dict[str, Any] = {"user": user.name, "groups": list(user.groups), **asked}
            if user.uid:
                spec["uid"] = user.uid
            if user.extra:
                spec["extra"] = {name: list(values) for name, values in user.extra}
            said = await self._ask(ACCESS_REVIEW, spec)
            allowed = bool(said.get("allowed")) and not said.get("denied")
            self._rights.put(key, allowed, YES_SECONDS if allowed else NO_SECONDS)
        return allowed

    async def _ask(self, kind: Kind, spec: dict[str, Any]) -> dict[str, Any]:
        body: Object = {"apiVersion": kind.api_version, "kind": kind.kind, "spec": spec}
        try:
            answer = await self._api.create(kind, "", body)
        except InvalidInput as error:
            # What a caller sent was not even worth a review.
            raise Denied("the token is none of this cluster") from error
        except (Denied, NotFound) as error:
            # It is the controller that was refused, not who asked.
            log.error("review.refused", kind=kind.kind, error=str(error))
            raise Unavailable(f"this controller cannot ask for a {kind.kind}", retry_after=5.0) from error
        found: dict[str, Any] = answer.get("status") or {}
        return found


def _reviewed(status: Mapping[str, Any], audience: str) -> User | None:
    found = status.get("user") or {}
    if not status.get("authenticated") or not found.get("username"):
        return None
    # A server that knows nothing of audiences says that the token is good, and for none.
    if audience and audience not in (status.get("audiences") or ()):
        return None
    extra = tuple((name, tuple(values)) for name, values in sorted((found.get("extra") or {}).items()))
    return User(found["username"], found.get("uid", ""), tuple(found.get("groups") or ()), extra)
