"""A client that hangs up costs neither an engine nor the queue anything more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from support.gateway import Engine, Routing, ask, held, in_flight, model


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_request_at_the_engine(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any, stream: bool
) -> None:
    engine: Engine = await make_engine(token_delay=0.02)
    await routing.tell(model(engine.replica()))
    request = asyncio.create_task(ask(client, stream=stream, max_tokens=10_000))
    await routing.until(lambda r: in_flight(r) == 1)
    seen = len(routing.reports)
    request.cancel()
    await routing.until(lambda r: in_flight(r) == 0 and all(m.in_flight == 0 for m in r.models), since=seen)
    await _reaches(lambda: engine.stub.counts["aborted"] == 1 and engine.stub.counts["running"] == 0)


async def test_a_client_that_hangs_up_while_held_is_no_demand_any_more(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    await routing.tell(model())
    request = asyncio.create_task(ask(client))
    await routing.until(lambda r: held(r) == 1)
    seen = len(routing.reports)
    request.cancel()
    await routing.until(lambda r: held(r) == 0, since=seen)
    engine: Engine = await make_engine()
    await routing.tell(model(engine.replica()))
    assert engine.stub.counts["started"] == 0


async def _reaches(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(2):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)
