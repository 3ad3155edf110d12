"""The agent's lasting link to its supervisor: starts it when none answers, connects again when it died."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from relight.agent.engines.base import EngineCommand
from relight.agent.supervisor.client import Exit, Running, SupervisorClient, launch
from relight.core.clock import Clock
from relight.core.errors import Unavailable
from relight.core.logs import get_logger

_log = get_logger("agent.link")
PATIENCE = 10.0
"""Seconds that a call waits for a supervisor that is being restarted."""
BESIDE_PATIENCE = 300.0
"""Seconds that one in another container is waited for: its image may still be pulled."""


class SupervisorLink:
    """Implements the stages' Spawner over whichever supervisor lives now."""

    def __init__(
        self,
        socket_path: Path,
        journal: Path,
        log: Path,
        clock: Clock,
        on_exit: Callable[[Exit], None],
        *,
        beside: bool = False,
    ) -> None:
        self._socket, self._journal, self._log_path = socket_path, journal, log
        self._beside = beside
        self._clock, self._on_exit = clock, on_exit
        self._client: SupervisorClient | None = None
        self._connected = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.owner = ""

    async def open(self) -> tuple[Running, ...]:
        """Connects, starting a supervisor when none answers and none runs beside. Raises Unavailable without one."""
        deadline = self._clock.monotonic() + (BESIDE_PATIENCE if self._beside else PATIENCE)
        while True:
            client = SupervisorClient(self._on_exit)
            try:
                await client.connect(self._socket)
                running = await client.list()
                break
            except Unavailable:
                await client.close()
                if self._clock.monotonic() >= deadline:
                    raise
                # Poll also reaps: a dead supervisor of ours must not stay a zombie.
                if not self._beside and (self._process is None or self._process.poll() is not None):
                    self._process = launch(self._socket, self._journal, self._log_path)
                await asyncio.sleep(0.2 if self._beside else 0.02)
        self._client, self.owner = client, client.owner
        self._connected.set()
        return running

    async def keep(self, reattached: Callable[[tuple[Running, ...]], None]) -> None:
        """Runs for ever: opens again whenever the supervisor goes away, then tells who still lives."""
        while True:
            if self._client is not None:
                await self._client.lost.wait()
            self._connected.clear()
            _log.warning("supervisor.lost")
            try:
                reattached(await self.open())
            except Unavailable as error:
                _log.error("supervisor.missing", reason=str(error))

    async def _ready(self) -> SupervisorClient:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._connected.wait()
        except TimeoutError:
            raise Unavailable("the supervisor does not come back") from None
        if self._client is None:
            raise Unavailable("the supervisor is not connected")
        return self._client

    async def spawn(self, instance: str, command: EngineCommand, log: Path) -> Running:
        """Starts an instance's main process, or finds it. Raises Conflict, InvalidInput, Unavailable."""
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            client = await self._ready()
            for found in await client.list():
                # The supervisor died after starting it and before it could say so.
                if found.instance == instance:
                    return found
            try:
                return await client.spawn(instance, command.argv, dict(command.env), command.cwd, log)
            except Unavailable:
                self._forget(client)

    async def environment(self) -> dict[str, str]:
        """Variables of where engines run. Raises InvalidInput (the supervisor is too old), Unavailable."""
        while True:
            client = await self._ready()
            try:
                return await client.environment()
            except Unavailable:
                self._forget(client)

    async def adopt(self, instance: str, pid: int) -> Running:
        """Has the supervisor answer for a forked process. Raises Conflict, NotFound, InvalidInput, Unavailable."""
        client = await self._ready()
        try:
            return await client.adopt(instance, pid)
        except Unavailable:
            self._forget(client)
            raise

    async def end(self, instance: str, grace_seconds: float) -> None:
        """Returns when the whole tree is gone. Raises Unavailable when no supervisor comes back."""
        while True:
            client = await self._ready()
            try:
                await client.end(instance, grace_seconds)
                return
            except Unavailable:
                self._forget(client)

    def _forget(self, client: SupervisorClient) -> None:
        if client is self._client and client.lost.is_set():
            self._connected.clear()

    async def close(self) -> None:
        """Drops the connection; supervisor and engines run on."""
        if self._client is not None:
            with contextlib.suppress(Exception):
                await self._client.close()
        if self._process is not None:
            # It outlives this process on purpose: without this the interpreter warns of it.
            self._process.returncode = self._process.poll() or 0
