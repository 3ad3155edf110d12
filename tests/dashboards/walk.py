"""A whole Relight under load, led through what dashboards are for, while Prometheus scrapes it.

Three models: `m` with a guardian that wakes as it should; `spoilt`, whose guardian fails its proof by shared memory and
wakes from disk; `compiled`, which is started, and compiles.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from tests.dashboards.prometheus import ROOT, Prometheus

from relight.agent.procfs import DEVICES, INSTANCE, OWNER
from support.agent import Slot
from support.controlplane import TOKENS, Process, client, free_port, model
from support.gateway import Door

DEADLINE = 60.0
CHECKOUT = {"PYTHONPATH": str(ROOT / "src")}
"""Engines inherit nothing: this is whose stubs they are."""
WAKES = 3
"""How often each is scaled out: a counter's series has to be there before it grows."""
SLEPT = {"replicas": 1, "level": 2}
MODELS = (
    model("m", replicas=1, guardians=SLEPT, env=CHECKOUT, args=["token_delay=0.01", "wake_seconds=1.5"]),
    model(
        "spoilt", replicas=1, guardians=SLEPT, env=CHECKOUT,
        args=["wake_seconds=0.2", 'wake_errors={"peer_shm": "canary"}'],
    ),
    model("compiled", replicas=1, mode="normal", env=CHECKOUT, args=['compiles="graph"']),
)  # fmt: skip


@dataclass(slots=True)
class Relight:
    """What runs, and how it is asked. `killed` is the engine that the test ended."""

    process: Process
    http: str
    slots: list[Slot]
    door: Door
    caller: httpx.AsyncClient
    public: httpx.AsyncClient
    metrics: dict[str, list[str]]
    answers: list[int]

    async def shown(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.caller.get(f"/api/v1/namespaces/default/models/{name}")).json()
        return found

    async def reaches(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Returns once `holds` is true of a model; each look is a round trip."""
        shown: dict[str, Any] = {}
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    shown = await self.shown(name)
                    if holds(shown):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            instances = (await self.caller.get("/api/v1/instances")).json()["items"]
            told = [(i["id"], i["model"], i["state"], i["desired"], i["cause"], i["failure"]) for i in instances]
            logs = "\n".join((slot.directory / "agent.log").read_text()[-3000:] for slot in self.slots)
            raise AssertionError(f"{shown}\n{told}\n{logs}") from None

    async def scale(self, name: str, replicas: int) -> None:
        reply = await self.caller.put(f"/api/v1/namespaces/default/models/{name}/scale", json={"replicas": replicas})
        assert reply.status_code == 202, reply.text
        path = f"/api/v1/operations/{reply.json()['id']}"
        ended = (await self.caller.get(path, params={"wait": 20})).json()
        while ended["state"] == "running":
            ended = (await self.caller.get(path, params={"wait": 20})).json()
        assert ended["state"] == "done", ended

    async def ask(self, name: str, tokens: int = 3) -> int:
        body = {"model": name, "prompt": "hello", "max_tokens": tokens}
        status = (await self.public.post("/v1/completions", json=body)).status_code
        self.answers.append(status)
        return status


@asynccontextmanager
async def running() -> AsyncIterator[Relight]:
    """Every model with a replica ready, and guardians asleep."""
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-")))
        rpc_port = free_port()
        process = Process(root, models=list(MODELS), grpc={"port": rpc_port})
        http, rpc = await process.start()
        stack.push_async_callback(process.end)
        slots, agents = [], []
        for name in ("a", "b"):
            directory = root / name
            directory.mkdir()
            agents.append(free_port())
            config = {
                "slot": name,
                "controller_address": rpc,
                "token": TOKENS["agent"],
                "state_dir": str(directory / "state"),
                "devices": [{"id": f"cpu-{n}", "memory_bytes": 1 << 30} for n in range(4)],
                "engines": {"stub": {}},
                "health_seconds": 0.5,
                "devices_seconds": 1.0,
                "host_tier": {"budget_bytes": 64 << 20},
                "metrics_port": agents[-1],
            }
            slots.append(Slot(SimpleNamespace(port=rpc_port), directory, config))
            await slots[-1].up()
            stack.push_async_callback(slots[-1].down)
        door = Door(root, SimpleNamespace(port=rpc_port), {"controller_address": rpc, "token": TOKENS["gateway"]})
        await door.up(attached=False)
        stack.push_async_callback(door.down)
        caller = await stack.enter_async_context(client(http))
        limits = httpx.Limits(max_connections=100)
        public = await stack.enter_async_context(
            httpx.AsyncClient(base_url=door.url, timeout=DEADLINE, limits=limits, trust_env=False)
        )
        metrics = {
            "controller": [http],
            "gateway": [door.url.removeprefix("http://")],
            "agent": [f"127.0.0.1:{port}" for port in agents],
        }
        made = Relight(process, http, slots, door, caller, public, metrics, [])
        for name, asleep in (("m", 1), ("spoilt", 1), ("compiled", 0)):
            await made.reaches(name, lambda m, asleep=asleep: m["ready"] == 1 and m["dormant"] == asleep)
        yield made


@asynccontextmanager
async def load(relight: Relight) -> AsyncIterator[None]:
    """Requests for two models, one after another, until it ends."""

    async def client_of(name: str) -> None:
        while True:
            await relight.ask(name)

    tasks = [asyncio.create_task(client_of(name)) for name in ("m", "m", "spoilt")]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def walk(relight: Relight, prometheus: Prometheus) -> None:
    """Scale-outs by guardian and by start, sleeps, failed proofs, a killed engine, hang-ups, an orphan, zero."""
    async with load(relight):
        for _ in range(WAKES):
            await relight.scale("m", 2)
            await relight.scale("spoilt", 2)
            await relight.scale("compiled", 2)
            for name in ("m", "spoilt", "compiled"):
                await relight.scale(name, 1)
        # Of one that is told something else at that moment the failure is of an earlier try, and not counted.
        await relight.reaches("m", lambda m: m["ready"] == 1 and m["dormant"] == 1)
        await _kill(relight, "m")
        await relight.reaches("m", lambda m: m["ready"] == 1 and m["dormant"] == 1)
    for _ in range(2):
        hung_up = asyncio.create_task(relight.ask("m", 200))
        await answering(prometheus, 'sum(relight_gateway_requests_in_flight{model="default/m"}) > 0')
        hung_up.cancel()
        await asyncio.gather(hung_up, return_exceptions=True)
    await _leave_an_orphan(relight, prometheus)
    await relight.scale("m", 0)
    assert await relight.ask("m") == 200
    # What grew last is scraped twice more before it is asked for.
    seen = prometheus.now("sum(scrape_samples_scraped)")[0]["value"][0]
    await answering(prometheus, f"min(timestamp(up)) > {seen + 2}")


async def _kill(relight: Relight, name: str) -> None:
    instances = (await relight.caller.get("/api/v1/instances")).json()["items"]
    victim = next(i for i in instances if i["model"].endswith(f"/{name}") and i["state"] == "ready")
    os.kill(victim["members"][0]["pid"], signal.SIGKILL)
    await relight.reaches(name, lambda m: m["ready"] == 0 or m["dormant"] == 0)


async def _leave_an_orphan(relight: Relight, prometheus: Prometheus) -> None:
    """A process that carries the mark of an instance which does not run: until it ends, a device is out of use."""
    slot = relight.slots[0]
    journal = (slot.directory / "state" / "supervisor.journal").resolve()
    marks = {OWNER: hashlib.sha256(str(journal).encode()).hexdigest()[:16], INSTANCE: "i-dead", DEVICES: "cpu-3"}
    orphan = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", env={**os.environ, **marks}, stdin=asyncio.subprocess.PIPE
    )  # fmt: skip
    # An engine that is being ended may be one for a moment, on another device.
    held = 'sum(relight_device_memory_bytes{kind="orphan",device="cpu-3"})'
    await answering(prometheus, f"{held} > {1 << 20}")
    orphan.kill()
    await orphan.wait()
    await answering(prometheus, f"{held} == 0")


async def answering(prometheus: Prometheus, expression: str) -> None:
    """Returns once the expression has a value; each look is a round trip."""
    async with asyncio.timeout(DEADLINE):
        while True:
            if await asyncio.to_thread(prometheus.now, expression):
                return
            await asyncio.sleep(0.2)
