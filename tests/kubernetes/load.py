"""Clients that do not stop asking, counting what was sent and what was lost; a real gateway to ask at."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.kubernetes.cluster import SOURCES, TOKENS, Cluster
from tests.kubernetes.figures import COUNTS
from tests.kubernetes.slots import end

CLIENTS = 4


@dataclass
class Load:
    """Requests of one test."""

    url: str
    sent: int = 0
    lost: list[str] = field(default_factory=list)
    answered: int = 0

    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def some_more(self, count: int = 20) -> None:
        """Returns when so many more were answered."""
        target = self.answered + count
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.answered >= target)


@asynccontextmanager
async def front_door(cluster: Cluster, model: str = "m") -> AsyncIterator[str]:
    """The URL of a gateway that is there while the block is, and knows the model."""
    directory = cluster.root / "gateway"
    directory.mkdir(exist_ok=True)
    path = directory / "gateway.json"
    config = {
        "controller_address": f"127.0.0.1:{cluster.grpc_port}",
        "token": TOKENS["gateway"],
        "hold": {"seconds": 60},
    }
    path.write_text(json.dumps(config))
    with (directory / "gateway.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relight.gateway", "--config", str(path), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=log, env={"PYTHONPATH": str(SOURCES)}, start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    url = line.split()[-1]
    try:
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            # As a pod's readiness probe waits before clients are sent to it.
            await cluster.until(lambda: _routes(client, url, model), "the gateway to know the model")
        yield url
    finally:
        await end(process)


@asynccontextmanager
async def load(cluster: Cluster, model: str = "m") -> AsyncIterator[Load]:
    """A gateway and clients that ask until the block is left; then none of their requests may be lost."""
    async with front_door(cluster, model) as url, asking(url, model) as found:
        yield found
    COUNTS.update(requests_sent=found.sent, requests_lost=len(found.lost))
    assert not found.lost, found.lost[:5]


@asynccontextmanager
async def asking(url: str, model: str, *, keep_connections: bool = True) -> AsyncIterator[Load]:
    """Clients that ask at `url` until the block is left; what was lost is told, and for the caller to judge."""
    over, found = asyncio.Event(), Load(url)
    limits = httpx.Limits(max_keepalive_connections=CLIENTS if keep_connections else 0)
    async with httpx.AsyncClient(timeout=90, trust_env=False, limits=limits) as client:
        clients = [asyncio.create_task(_ask(client, found, model, over)) for _ in range(CLIENTS)]
        try:
            yield found
        finally:
            over.set()
            await asyncio.gather(*clients)


async def _routes(client: httpx.AsyncClient, url: str, model: str) -> bool:
    reply = await client.get(f"{url}/v1/models")
    return reply.status_code == 200 and any(m["id"] == model for m in reply.json()["data"])


async def _ask(client: httpx.AsyncClient, load: Load, model: str, over: asyncio.Event) -> None:
    body: dict[str, Any] = {"model": model, "prompt": "hello", "max_tokens": 4}
    while not over.is_set():
        load.sent += 1
        try:
            reply = await client.post(f"{load.url}/v1/completions", json=body)
            if reply.status_code == 200 and reply.json()["choices"][0]["text"]:
                load.answered += 1
                async with load.changed:
                    load.changed.notify_all()
            else:
                load.lost.append(f"{reply.status_code}: {reply.text[:300]}")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            load.lost.append(f"{type(error).__name__}: {error}")
        # Each waits a little, so that the stubs' processors are left to others.
        await asyncio.sleep(0.03)
