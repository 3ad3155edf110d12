"""Controller, gateway, two agents and stub engines as processes: no request is lost by a scale event."""

from __future__ import annotations

import asyncio
import os
import signal
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
from support.gateway import OPERATOR, Door

MODEL = "/api/v1/namespaces/default/models/m"
ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}


@pytest.fixture
async def system() -> AsyncIterator[Any]:
    """Everything, with one replica ready and one guardian dormant."""
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-")))
        port = free_port()
        spec = model(replicas=1, guardians={"replicas": 1}, args=["token_delay=0.005"])
        process = Process(root, models=[spec], grpc={"port": port})
        http, rpc = await process.start()
        stack.push_async_callback(process.end)
        slots = []
        for name in ("a", "b"):
            directory = root / name
            directory.mkdir()
            config = {
                "slot": name,
                "controller_address": rpc,
                "token": TOKENS["agent"],
                "state_dir": str(directory / "state"),
                "devices": [{"id": "cpu-0", "memory_bytes": 1 << 30}],
                "engines": {"stub": {}},
                "health_seconds": 0.2,
            }
            slots.append(Slot(SimpleNamespace(port=port), directory, config))
            await slots[-1].up()
            stack.push_async_callback(slots[-1].down)
        changes = {"controller_address": rpc, "token": TOKENS["gateway"]}
        door = Door(root, SimpleNamespace(port=port), changes)
        await door.up(attached=False)
        stack.push_async_callback(door.down)
        caller = await stack.enter_async_context(client(http))
        limits = httpx.Limits(max_connections=100)
        public = await stack.enter_async_context(httpx.AsyncClient(base_url=door.url, timeout=DEADLINE, limits=limits))
        made = SimpleNamespace(process=process, slots=slots, door=door, caller=caller, public=public)
        await _reaches(made, lambda m: m["ready"] == 1 and m["dormant"] == 1)
        yield made


async def _reaches(system: Any, holds: Any) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            if holds((await system.caller.get(MODEL)).json()):
                return
            await asyncio.sleep(0.02)


async def _scale(system: Any, replicas: int, **body: Any) -> dict[str, Any]:
    reply = await system.caller.put(f"{MODEL}/scale", json={"replicas": replicas, **body})
    assert reply.status_code == 202, reply.text
    ended = await system.caller.get(f"/api/v1/operations/{reply.json()['id']}", params={"wait": DEADLINE})
    assert ended.json()["state"] == "done", ended.text
    return ended.json()


class Load:
    """Requests one after another, by several clients, until it is stopped; every answer is kept."""

    def __init__(self, public: httpx.AsyncClient, clients: int = 3) -> None:
        self.answers: list[httpx.Response] = []
        self.stopped = False
        self._answered = asyncio.Condition()
        self.tasks = [asyncio.create_task(self._run(public)) for _ in range(clients)]

    async def _run(self, public: httpx.AsyncClient) -> None:
        while not self.stopped:
            self.answers.append(await public.post("/v1/completions", json=ASK))
            async with self._answered:
                self._answered.notify_all()

    async def until_several_serve(self) -> None:
        """Returns when more than one incarnation has answered."""
        async with asyncio.timeout(DEADLINE), self._answered:
            await self._answered.wait_for(lambda: len({_who(a) for a in self.answers}) > 1)

    async def stop(self) -> list[httpx.Response]:
        self.stopped = True
        await asyncio.gather(*self.tasks)
        return self.answers


def _who(answer: httpx.Response) -> tuple[str | None, str | None]:
    return answer.headers.get("x-relight-instance"), answer.headers.get("x-relight-incarnation")


def _all_good(answers: list[httpx.Response]) -> None:
    assert {a.status_code for a in answers} == {200}, [a.text for a in answers if a.status_code != 200][:3]
    assert len({a.json()["choices"][0]["text"] for a in answers}) == 1


async def test_no_request_fails_while_replicas_come_and_go(system: Any) -> None:
    load = Load(system.public)
    for _ in range(2):
        await _scale(system, 2)
        # Only a replica that was used proves anything by going.
        await load.until_several_serve()
        await _scale(system, 1)
    _all_good(await load.stop())


async def test_a_request_pinned_to_the_next_replica_is_answered_by_the_one_that_is_woken(system: Any) -> None:
    pin = {"x-relight-pin": "next", "authorization": f"Bearer {OPERATOR}"}
    request = asyncio.create_task(system.public.post("/v1/completions", json=ASK, headers=pin))
    operation = await _scale(system, 2)
    answer = await request
    assert answer.status_code == 200
    assert [answer.headers["x-relight-instance"]] == operation["instances"]


async def test_fifty_requests_at_zero_replicas_wake_one_and_all_are_answered(system: Any) -> None:
    await _scale(system, 0)
    await _reaches(system, lambda m: m["ready"] == 0)
    answers = await asyncio.gather(*(system.public.post("/v1/completions", json=ASK) for _ in range(50)))
    _all_good(answers)
    assert len({a.headers["x-relight-instance"] for a in answers}) == 1


async def test_requests_go_on_while_agent_and_controller_are_killed(system: Any) -> None:
    load = Load(system.public)
    for slot in system.slots:
        await slot.kill()
        await slot.up()
    await system.process.end(9)
    await system.process.start()
    _all_good(await load.stop())


async def test_requests_at_a_killed_engine_are_answered_by_another_replica(system: Any) -> None:
    await _scale(system, 2)
    first = await system.public.post("/v1/completions", json=ASK)
    instances = (await system.caller.get("/api/v1/instances")).json()["items"]
    victim = next(i for i in instances if i["id"] == first.headers["x-relight-instance"])
    pid = victim["members"][0]["pid"]
    load = Load(system.public)
    os.kill(pid, signal.SIGKILL)
    await _reaches(system, lambda m: m["ready"] == 2)
    _all_good(await load.stop())
