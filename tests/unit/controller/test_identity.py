"""Who a cluster says that callers are and what it lets them do: remembered for seconds, and never guessed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from relight.controller.api.callers import Right
from relight.controller.api.middleware import Gate
from relight.controller.kubernetes.identity import ClusterCallers, UserCaller
from relight.controller.kubernetes.reviews import NO_SECONDS, REMEMBERED, TOKEN_REVIEW, YES_SECONDS, Reviews, User
from relight.core.auth import Identity, Role, TokenEntry, Tokens, hash_token
from relight.core.clock import VirtualClock
from relight.core.errors import Denied, RelightError, Unavailable

OPERATOR = Tokens([TokenEntry(hash_token("t-op"), Identity("op", frozenset({Role.OPERATOR})))])


class FakeApi:
    """Answers reviews: tokens are of whom `users` says, and `rights` are (user, verb, namespace)."""

    def __init__(self, users=(), rights=()) -> None:
        self.users, self.rights = dict(users), set(rights)
        self.asked: list[str] = []
        self.down: RelightError | None = None

    async def create(self, kind, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.down is not None:
            raise self.down
        spec = body["spec"]
        if kind is TOKEN_REVIEW:
            self.asked.append(spec["token"])
            user = self.users.get(spec["token"])
            status = {"authenticated": user is not None, "user": {"username": user} if user else {}}
            return {"status": {**status, "audiences": ["of-the-server"]}}
        right = spec["resourceAttributes"]
        self.asked.append(f"{spec['user']} {right['verb']} {right.get('namespace', '*')}")
        return {"status": {"allowed": (spec["user"], right["verb"], right.get("namespace", "*")) in self.rights}}


@pytest.fixture
def api() -> FakeApi:
    return FakeApi({"t-ann": "ann"}, {("ann", "list", "a"), ("ann", "get", "a")})


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_an_answer_is_asked_for_once_in_its_time_the_negative_one_too(api, clock) -> None:
    reviews = Reviews(api, clock)
    for _ in range(3):
        assert (await reviews.user("t-ann")).name == "ann"
        with pytest.raises(Denied, match="none of this cluster"):
            await reviews.user("wrong")
    assert api.asked == ["t-ann", "wrong"]
    clock.advance(NO_SECONDS + 0.1)
    api.users["wrong"] = "late"
    assert (await reviews.user("wrong")).name == "late"
    assert (await reviews.user("t-ann")).name == "ann"
    assert api.asked == ["t-ann", "wrong", "wrong"]
    clock.advance(YES_SECONDS)
    del api.users["t-ann"]
    with pytest.raises(Denied):
        await reviews.user("t-ann")


async def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(api, clock) -> None:
    reviews = Reviews(api, clock)
    await reviews.user("t-ann")
    for n in range(REMEMBERED):
        with pytest.raises(Denied):
            await reviews.user(f"guess-{n}")
    await reviews.user("t-ann")
    assert api.asked.count("t-ann") == 2
    with pytest.raises(Denied):
        await reviews.user(f"guess-{REMEMBERED - 1}")
    assert len(api.asked) == REMEMBERED + 2


async def test_a_token_that_was_not_made_for_the_audience_is_nobodys(api, clock) -> None:
    with pytest.raises(Denied, match="for relight"):
        await Reviews(api, clock).user("t-ann", "relight")


async def test_rights_are_asked_of_the_cluster_for_each_namespace(api, clock) -> None:
    ann = UserCaller(User("ann"), Reviews(api, clock))
    await ann.require(Right("get", "a", "m"))
    with pytest.raises(Denied, match="ann may not patch modeldeployments/scale in namespace a") as refused:
        await ann.require(Right("patch", "a", "m", subresource="scale"))
    assert refused.value.authenticated
    assert await ann.within("list", ["a", "b", ""]) == {"a"}
    api.rights.add(("root", "list", "*"))
    assert await UserCaller(User("root"), Reviews(api, clock)).within("list", ["a", "b", ""]) == {"a", "b", ""}


async def test_a_configured_token_is_asked_of_nobody(api, clock) -> None:
    caller = await ClusterCallers(OPERATOR, Reviews(api, clock))("Bearer t-op")
    await caller.require(Right("patch", "b", "m"))
    assert api.asked == []


@pytest.mark.parametrize("error", [Unavailable("it is away", retry_after=1.0), Denied("forbidden", authenticated=True)])
async def test_who_cannot_be_asked_about_is_not_let_in_and_told_when_to_come_back(api, clock, error) -> None:
    api.down = error

    async def never(scope, receive, send) -> None:
        raise AssertionError("it was let in")

    gate = Gate(never, ClusterCallers(OPERATOR, Reviews(api, clock)), clock)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://relight") as client:
        reply = await client.get("/api/v1/instances", headers={"Authorization": "Bearer t-ann"})
    assert reply.status_code == 503
    assert reply.headers["content-type"] == "application/problem+json"
    assert int(reply.headers["retry-after"]) >= 1
