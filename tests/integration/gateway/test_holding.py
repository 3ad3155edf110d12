"""Requests wait while no replica is ready, go on at a pace, and are refused when none can come."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx

from support.gateway import DEADLINE, TEXT, Door, Routing, ask, held, in_flight, model


async def test_before_any_routes_were_told_it_is_not_ready(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/readyz")).status_code == 503
    answer = await ask(client)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_known_model_that_cannot_come_is_503_with_the_reason(
    client: httpx.AsyncClient, routing: Routing
) -> None:
    await routing.tell(model(can_come=False, reason="no free device"))
    answer = await ask(client)
    assert answer.status_code == 503
    assert "no free device" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_held_requests_are_refused_once_nothing_can_come_any_more(
    client: httpx.AsyncClient, routing: Routing
) -> None:
    await routing.tell(model(coming=1))
    request = asyncio.create_task(ask(client))
    await routing.until(lambda r: held(r) == 1)
    await routing.tell(model(can_come=False, reason="the wake failed"))
    assert (await request).status_code == 503


async def test_fifty_requests_at_zero_replicas_are_one_demand_and_all_are_answered(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    await routing.tell(model())
    seen = len(routing.reports)
    requests = [asyncio.create_task(ask(client)) for _ in range(50)]
    await routing.until(lambda r: held(r) == 50)
    risen = [held(r) for r in routing.reports[seen:]]
    assert risen == sorted(risen)
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    answers = await asyncio.gather(*requests)
    assert {a.status_code for a in answers} == {200}
    assert {a.json()["choices"][0]["text"] for a in answers} == {TEXT}
    await routing.until(lambda r: held(r) == 0 and in_flight(r) == 0, since=len(routing.reports) - 1)


async def test_the_first_held_request_goes_at_once_and_the_rest_follow_at_the_pace(
    make_door: Any, routing: Routing, make_engine: Any
) -> None:
    door = await make_door(hold={"release_per_second": 0.001})
    engine = await make_engine()
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE) as client:
        await routing.tell(model())
        requests = [asyncio.create_task(ask(client)) for _ in range(3)]
        await routing.until(lambda r: held(r) == 3)
        await routing.tell(model(engine.replica()))
        done, waiting = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        assert engine.stub.counts["started"] == 1
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_full_queue_answers_429_with_retry_after(make_door: Any, routing: Routing) -> None:
    door = await make_door(hold={"limit": 2})
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE) as client:
        await routing.tell(model(next_ready_seconds=7.0))
        requests = [asyncio.create_task(ask(client)) for _ in range(2)]
        await routing.until(lambda r: held(r) == 2)
        answer = await ask(client)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def test_the_configured_hold_time_is_the_real_one(make_door: Any, routing: Routing) -> None:
    door = await make_door(hold={"seconds": 0.3})
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE) as client:
        await routing.tell(model())
        answer = await ask(client)
    assert answer.status_code == 503
    assert "0.3 s" in answer.json()["error"]["message"]


async def test_what_is_held_is_refused_when_the_gateway_is_told_to_end(
    client: httpx.AsyncClient, door: Door, routing: Routing
) -> None:
    await routing.tell(model())
    request = asyncio.create_task(ask(client))
    await routing.until(lambda r: held(r) == 1)
    assert door.process is not None
    door.process.send_signal(signal.SIGTERM)
    assert (await request).status_code == 503
    async with asyncio.timeout(DEADLINE):
        assert await door.process.wait() == 0
