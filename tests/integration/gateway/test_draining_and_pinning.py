"""Which of several replicas a request goes to: the idlest, not a drained one, or the pinned one."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from support.gateway import OPERATOR, VIEWER, Routing, ask, held, in_flight, model


async def test_a_drained_replica_gets_nothing_new_and_its_last_request_is_told(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    old, new = await make_engine("i-old", token_delay=0.01), await make_engine("i-new")
    await routing.tell(model(old.replica()))
    request = asyncio.create_task(ask(client, max_tokens=50))
    await routing.until(lambda r: in_flight(r) == 1)
    table = await routing.tell(model(new.replica()))
    assert (await ask(client)).headers["x-relight-instance"] == "i-new"
    report = await routing.until(
        lambda r: r.route_revision == table.revision and not any(i.instance == "i-old" for i in r.instances)
    )
    assert report.route_revision == table.revision
    assert (await request).status_code == 200


async def test_requests_go_where_the_fewest_are(client: httpx.AsyncClient, routing: Routing, make_engine: Any) -> None:
    one, two = await make_engine("i-1", token_delay=0.01), await make_engine("i-2", token_delay=0.01)
    await routing.tell(model(one.replica(), two.replica()))
    answers = await asyncio.gather(*(ask(client, max_tokens=30) for _ in range(10)))
    assert sorted(a.headers["x-relight-instance"] for a in answers) == ["i-1"] * 5 + ["i-2"] * 5


@pytest.mark.parametrize(("token_", "status"), [("", 401), ("rlt_wrong", 401), (VIEWER, 403)])
async def test_only_operators_pin(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any, token_: str, status: int
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    headers = {"x-relight-pin": "i-a"} | ({"authorization": f"Bearer {token_}"} if token_ else {})
    assert (await ask(client, headers)).status_code == status


async def test_a_pin_goes_to_that_replica_and_waits_for_it(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    one, two = await make_engine("i-1"), await make_engine("i-2")
    await routing.tell(model(one.replica()))
    pin = {"x-relight-pin": "i-2", "authorization": f"Bearer {OPERATOR}"}
    request = asyncio.create_task(ask(client, pin))
    await routing.until(lambda r: held(r) == 1)
    assert (await ask(client)).headers["x-relight-instance"] == "i-1"
    await routing.tell(model(one.replica(), two.replica()))
    assert (await request).headers["x-relight-instance"] == "i-2"
    assert (await ask(client, pin)).headers["x-relight-instance"] == "i-2"


async def test_the_pin_next_waits_for_the_next_incarnation_to_become_ready(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine("i-1")
    await routing.tell(model(engine.replica(1)))
    pin = {"x-relight-pin": "next", "authorization": f"Bearer {OPERATOR}"}
    request = asyncio.create_task(ask(client, pin))
    await routing.until(lambda r: held(r) == 1)
    await routing.tell(model(engine.replica(1)))
    await routing.tell(model(engine.replica(2)))
    assert (await request).headers["x-relight-incarnation"] == "2"
