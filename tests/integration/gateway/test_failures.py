"""Failures are hidden from the client before the first byte, and never answered twice after it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from support.gateway import ASK, DEADLINE, Door, Routing, ask, held, model


async def test_a_server_error_is_tried_elsewhere_before_the_first_byte(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    bad, good = await make_engine("i-bad", fail_first=99), await make_engine("i-good")
    await routing.tell(model(bad.replica(), good.replica()))
    answers = [await ask(client) for _ in range(4)]
    assert {a.status_code for a in answers} == {200}
    assert {a.headers["x-relight-instance"] for a in answers} == {"i-good"}
    assert bad.stub.counts["started"] > 0


async def test_a_server_error_of_the_only_replica_is_the_answer(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine(fail_first=1)
    await routing.tell(model(engine.replica()))
    assert (await ask(client)).status_code == 500
    assert (await ask(client)).status_code == 200


async def test_an_answer_that_a_draining_replica_gives_up_is_begun_anew_elsewhere(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    going, good = await make_engine("i-going", give_up_first=99), await make_engine("i-good")
    await routing.tell(model(going.replica(), good.replica()))
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", {**ASK, "messages": [], "prompt": None})):
        answers = [await client.post(path, json=body) for _ in range(4)]
        assert {a.json()["choices"][0]["finish_reason"] for a in answers} == {"length"}
        assert {a.headers["x-relight-instance"] for a in answers} == {"i-good"}
    assert going.stub.counts["started"] > 0


async def test_a_replica_that_cannot_be_reached_is_replaced_by_another(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    dead, good = await make_engine("i-dead"), await make_engine("i-good")
    await routing.tell(model(dead.replica(), good.replica()))
    await dead.down()
    assert {(await ask(client)).headers["x-relight-instance"] for _ in range(4)} == {"i-good"}


async def test_a_request_whose_only_replica_died_is_held_for_the_next_one(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    dead = await make_engine("i-dead")
    await routing.tell(model(dead.replica()))
    await dead.down()
    request = asyncio.create_task(ask(client))
    async with asyncio.timeout(DEADLINE):
        while "relight_gateway_retries_total{" not in (await client.get("/metrics")).text:
            pass
    await routing.tell(model(coming=1))
    await routing.until(lambda r: held(r) == 1, since=len(routing.reports) - 1)
    good = await make_engine("i-good")
    await routing.tell(model(good.replica()))
    assert (await request).headers["x-relight-instance"] == "i-good"


async def test_a_stream_that_breaks_after_its_first_byte_is_cut_and_not_begun_again(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    broken, other = await make_engine("i-broken", cut_after=2), await make_engine("i-other", cut_after=2)
    await routing.tell(model(broken.replica(), other.replica()))
    pieces: list[bytes] = []

    async def read() -> None:
        async with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
            async for piece in answer.aiter_bytes():
                pieces.append(piece)  # noqa: PERF401 - what came before the cut counts

    with pytest.raises(httpx.RemoteProtocolError):
        await read()
    assert b"".join(pieces).count(b"data: ") == 2
    assert broken.stub.counts["started"] + other.stub.counts["started"] == 1


async def test_an_idle_connection_that_the_engine_closed_is_replaced(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    assert (await ask(client)).status_code == 200
    for writer in engine.connections:
        writer.transport.abort()
    assert (await ask(client)).status_code == 200


async def test_the_last_routes_stay_in_force_while_the_controller_is_away(
    door: Door, client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    routing.cut()
    assert (await ask(client)).status_code == 200
