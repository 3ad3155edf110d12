"""Two models whose guardians share a device: whoever has requests is awake, the other one sleeps, all are answered."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from support.agent import Slot
from support.controlplane import DEADLINE, TOKENS, Process, client, free_port, model
from support.gateway import Door


@pytest.fixture
async def shared() -> AsyncIterator[Any]:
    """One device, and a guardian of each of two models on it."""
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-")))
        port = free_port()
        specs = [model(name, guardians={"replicas": 1, "max_per_device": 2}) for name in "mn"]
        process = Process(root, models=specs, grpc={"port": port})
        http, rpc = await process.start()
        stack.push_async_callback(process.end)
        directory = root / "a"
        directory.mkdir()
        config = {
            "slot": "a", "controller_address": rpc, "token": TOKENS["agent"], "state_dir": str(directory / "state"),
            "devices": [{"id": "cpu-0", "memory_bytes": 1 << 30}], "engines": {"stub": {}}, "health_seconds": 0.2,
        }  # fmt: skip
        slot = Slot(SimpleNamespace(port=port), directory, config)
        await slot.up()
        stack.push_async_callback(slot.down)
        changes = {"controller_address": rpc, "token": TOKENS["gateway"]}
        door = Door(root, SimpleNamespace(port=port), changes)
        await door.up(attached=False)
        stack.push_async_callback(door.down)
        caller = await stack.enter_async_context(client(http))
        public = await stack.enter_async_context(httpx.AsyncClient(base_url=door.url, timeout=DEADLINE))
        made = SimpleNamespace(caller=caller, public=public)
        await _until(made, lambda found: found == {"m": "dormant", "n": "dormant"})
        yield made


async def _states(shared: Any) -> dict[str, str]:
    items = (await shared.caller.get("/api/v1/instances")).json()["items"]
    return {i["model"].partition("/")[2]: i["state"] for i in items if i["state"] != "gone"}


async def _until(shared: Any, holds: Any) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            if holds(await _states(shared)):
                return
            await asyncio.sleep(0.02)


async def _ask(shared: Any, name: str) -> httpx.Response:
    return await shared.public.post("/v1/completions", json={"model": name, "prompt": "hello", "max_tokens": 3})


async def test_whoever_is_asked_wakes_and_the_one_that_has_nothing_to_do_gives_way(shared: Any) -> None:
    for turn in range(6):
        name, other = ("m", "n") if turn % 2 == 0 else ("n", "m")
        answers = await asyncio.gather(*(_ask(shared, name) for _ in range(4)))
        assert [a.status_code for a in answers] == [200] * 4, answers[0].text
        assert await _states(shared) == {name: "ready", other: "dormant"}


async def test_both_are_answered_when_both_are_asked_at_once(shared: Any) -> None:
    answers = await asyncio.gather(*(_ask(shared, name) for name in "mnmnmn"))
    assert [a.status_code for a in answers] == [200] * 6
