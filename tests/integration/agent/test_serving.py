"""The serving port: only requests for what is ready here, by each of its names; no other part of an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from relight.core.records import Adapter, Desired
from relight.core.states import State
from support.agent import Slot
from support.live import free_ports

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


@asynccontextmanager
async def client(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as made:
        yield made


@pytest.fixture
async def serving(make_slot: Callable[..., Slot]) -> tuple[Slot, int]:
    (port,) = free_ports(1)
    slot = make_slot(serving_port=port)
    await slot.up()
    return slot, port


def refused(reply: httpx.Response) -> str:
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1"), reply.text
    return reply.json()["error"]["message"]


async def test_a_slot_serves_the_model_that_is_ready_by_each_of_its_names_and_no_other(
    serving: tuple[Slot, int],
) -> None:
    slot, port = serving
    async with client(port) as asked:
        assert "nothing is ready" in refused(await asked.post("/v1/completions", json=ASK))
        assert "nothing is ready" in refused(await asked.get("/health"))
        wanted = slot.instance("i-a", Desired.READY)
        adapters = (Adapter("french", "/french"),)
        wanted = replace(wanted, spec=replace(wanted.spec, served_names=("tiny", "alias"), adapters=adapters))
        slot.want(wanted)
        await slot.until("i-a", State.READY)
        for name in ("tiny", "alias"):
            reply = await asked.post("/v1/completions", json={**ASK, "model": name})
            assert (reply.status_code, bool(reply.json()["choices"])) == (200, True), reply.text
        incarnation = reply.headers["x-relight-incarnation"]
        # Engines know adapters by the names that clients do, and the stub knows none.
        reply = await asked.post("/v1/completions", json={**ASK, "model": "french"})
        assert (reply.status_code, "french" in reply.text) == (404, True), reply.text
        assert (await asked.get("/health")).json()["instance"] == "i-a"
        assert "'other' is asked for" in refused(await asked.post("/v1/completions", json={**ASK, "model": "other"}))
        same = await asked.post("/v1/completions", json=ASK, headers={"x-relight-incarnation": incarnation})
        assert same.status_code == 200
        late = await asked.post("/v1/completions", json=ASK, headers={"x-relight-incarnation": "999"})
        assert "999 is asked for" in refused(late)
        assert (await asked.get("/v1/models")).json()["data"]
        controls = ("/sleep", "/wake_up", "/collective_rpc", "/control/sleep", "/v1/../sleep", "//sleep", "/v1/loads")
        for path in (*controls, "/v1/load_lora_adapter", "/v1/models/x/../../load_lora_adapter", "/v1/completions/"):
            assert (await asked.post(path)).status_code in (404, 405), path


async def test_a_stream_that_runs_is_finished_and_what_comes_while_it_drains_is_refused(
    serving: tuple[Slot, int],
) -> None:
    slot, port = serving
    slot.want(slot.instance("i-a", Desired.READY, "token_delay=0.05"))
    await slot.until("i-a", State.READY)
    async with client(port) as asked:
        body = {**ASK, "max_tokens": 20, "stream": True}
        async with asked.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.aiter_lines()
            first = await anext(lines)
            slot.change("i-a", Desired.DORMANT)
            await slot.until("i-a", State.DRAINING)
            assert "nothing is ready" in refused(await asked.post("/v1/completions", json=ASK))
            rest = [line async for line in lines if line.startswith("data: ")]
        tokens = [json.loads(line[6:]) for line in [first, *rest] if line.startswith("data: {")]
        assert len(tokens) >= 20
        assert rest[-1] == "data: [DONE]"
        await slot.until("i-a", State.DORMANT)


async def test_a_client_that_hangs_up_ends_its_request_at_the_engine(serving: tuple[Slot, int]) -> None:
    slot, port = serving
    slot.want(slot.instance("i-a", Desired.READY, "token_delay=0.05"))
    await slot.until("i-a", State.READY)
    async with client(port) as asked:
        async with asked.stream("POST", "/v1/completions", json={**ASK, "max_tokens": 4000, "stream": True}) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            await slot.until("i-a", State.READY, lambda i: i.requests_running == 1)
            seen = len(slot.fleet.reports)
        await slot.until("i-a", State.READY, lambda i: i.requests_running == 0, since=seen)


async def test_a_port_that_is_taken_ends_the_agent_with_the_reason(make_slot: Callable[..., Slot]) -> None:
    (port,) = free_ports(1)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    slot = make_slot(serving_port=port)
    with pytest.raises(AssertionError, match=f"cannot serve on 127.0.0.1:{port}"):
        await slot.up()
    server.close()
