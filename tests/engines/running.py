"""The double as a process of its own, started by the driver's own command line, and a client that knows nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx

from relight.agent.devices.base import Device
from relight.agent.engines.base import EngineCommand, MemberContext
from relight.agent.engines.sglang import SglangDriver
from relight.agent.engines.sglang_handle import SglangHandle
from relight.core.clock import Clock, SystemClock
from relight.core.records import Desired, Guardians, InstanceAssignment, ModelSpec
from relight.plugin import look

if TYPE_CHECKING:
    from relight.agent.surroundings import Surroundings

DOUBLE = Path(__file__).parent / "double"
DEADLINE = 15.0
DEVICE = Device("gpu-0", "nvidia", "gpu-0", 80 << 30)


class Around:
    """Answers as where engines run would, and is here."""

    here = True
    variables: Mapping[str, str] = {"PATH": os.environ["PATH"]}

    async def ask(self, python: str, question: Mapping[str, Any]) -> Any:
        return look.answer(dict(question))


@dataclass
class Running:
    """A double that listens. `careless` speaks to it as somebody would who has not read its source."""

    process: asyncio.subprocess.Process
    context: MemberContext
    driver: SglangDriver
    handle: SglangHandle
    careless: httpx.AsyncClient

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def again(self) -> SglangHandle:
        """A handle that knows only what is on disk, as an agent's successor makes it."""
        return self.driver.handle(self.context)

    async def death(self) -> str:
        """Waits for its end, and says what it died of."""
        async with asyncio.timeout(DEADLINE):
            await self.process.wait()
        note = self.context.directory / "double.died"
        return note.read_text() if note.exists() else ""

    async def fatal(self, route: str, body: Mapping[str, Any] | None = None) -> str:
        """Makes a call that it does not survive; returns what it died of."""
        with suppress(httpx.TransportError):
            await self.careless.post(route, json=body or {})
        return await self.death()

    async def busy(self) -> None:
        """Returns once a request runs."""
        while True:
            if (await self.handle.health()).requests_running:
                return
            await asyncio.sleep(0.01)

    def asked(self) -> list[str]:
        """Every route that was called, in order."""
        path = self.context.directory / "double.calls"
        return [json.loads(line)[1] for line in path.read_text().splitlines()]

    def bodies(self, route: str) -> list[Any]:
        """What a route was called with, in order."""
        path = self.context.directory / "double.calls"
        return [found[2] for line in path.read_text().splitlines() if (found := json.loads(line))[1] == route]


def context_for(
    directory: Path, model: Path, *args: str, level: int = 2, odd: Any = None, **spec: Any
) -> MemberContext:
    """A member on one GPU; `odd` is what shall go wrong in its engine."""
    directory.mkdir(exist_ok=True)
    env = {"SGLANG_DOUBLE": json.dumps(odd or {}), "PYTHONPATH": f"{DOUBLE}:{Path(__file__).parents[2] / 'src'}"}
    values = {"args": args, "env": env, "guardians": Guardians(level=level), **spec}
    made = ModelSpec("default", "m", str(model), "r1", "sglang", **values)
    wanted = InstanceAssignment(
        "i-a", made.key, made, 0, 1, (DEVICE.id,), Desired.READY, level=level, content_revision="r1"
    )  # fmt: skip
    return MemberContext(wanted, directory, directory / "log", "127.0.0.1")


def driver() -> SglangDriver:
    return SglangDriver((DEVICE,), cast("Surroundings", Around()), sys.executable)


@asynccontextmanager
async def running(
    directory: Path, model: Path, *args: str, clock: Clock | None = None, env: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Running]:  # fmt: skip
    """One that is ready, ended with all that it started. `env` is put on top of the driver's own."""
    context = context_for(directory, model, *args, **options)
    made = driver()
    command = await made.command(context)
    process = await _spawn(command, context.log_path, env or {})
    handle = SglangHandle(context, clock or SystemClock(), "m")
    where = json.loads((directory / "start.json").read_text())
    key = (directory / "sglang.yaml").read_text().partition(":")[2].strip()
    client = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{where['port']}", timeout=DEADLINE, trust_env=False,
        headers={"Authorization": f"Bearer {key}"},
    )  # fmt: skip
    try:
        await handle.wait_ready(DEADLINE, lambda said: None)
        yield Running(process, context, made, handle, client)
    finally:
        await client.aclose()
        await handle.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def _spawn(command: EngineCommand, log: Path, env: Mapping[str, str]) -> asyncio.subprocess.Process:
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *command.argv, env={**command.env, **env}, cwd=command.cwd, stdout=file, stderr=file, start_new_session=True
        )
