"""What the gateway tells of requests: the spans of the first one, and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from support.gateway import Routing, ask, held, model


async def test_the_first_request_of_an_incarnation_is_told_as_two_spans_without_a_gap(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    await routing.tell(model())
    request = asyncio.create_task(ask(client, stream=True))
    await routing.until(lambda r: held(r) == 1)
    engine = await make_engine()
    await routing.tell(model(engine.replica(3)))
    await request
    await ask(client)
    report = await routing.until(lambda r: len(r.spans) >= 2)
    assert [(s.instance, s.incarnation, s.name) for s in report.spans] == [
        ("i-a", 3, "route"),
        ("i-a", 3, "first_token"),
    ]
    assert report.spans[0].start <= report.spans[0].end == report.spans[1].start <= report.spans[1].end


async def test_metrics_name_known_models_only(client: httpx.AsyncClient, routing: Routing, make_engine: Any) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    await ask(client)
    await ask(client, model="invented-by-a-client")
    text = (await client.get("/metrics")).text
    assert 'relight_gateway_requests_total{model="default/tiny",status="200"} 1.0' in text
    assert 'relight_gateway_requests_total{model="other",status="404"} 1.0' in text
    assert "invented" not in text


async def test_metrics_say_whether_the_controller_speaks_and_how_long_the_oldest_request_waits(
    client: httpx.AsyncClient, routing: Routing
) -> None:
    async def value(name: str) -> float:
        (line,) = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(name)]
        return float(line.rpartition(" ")[2])

    assert await value("relight_gateway_attached ") == 0
    await routing.tell(model(coming=1))
    assert await value("relight_gateway_attached ") == 1
    requests = [asyncio.create_task(ask(client)) for _ in range(2)]
    await routing.until(lambda r: held(r) == 2)
    first = await value("relight_gateway_oldest_held_seconds{")
    assert await value("relight_gateway_oldest_held_seconds{") > first > 0
    await routing.tell(model(can_come=False, reason="the wake failed"))
    await asyncio.gather(*requests)
    assert await value("relight_gateway_oldest_held_seconds{") == 0
