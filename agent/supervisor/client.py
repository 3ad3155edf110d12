"""The agent's side of the supervisor's socket: start it when none answers, ask, hear of exits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relight.agent.supervisor import wire
from relight.core.errors import Conflict, InvalidInput, NotFound, RelightError, Unavailable

_ERRORS: dict[str, type[RelightError]] = {
    "conflict": Conflict,
    "not-found": NotFound,
    "invalid-input": InvalidInput,
}


@dataclass(frozen=True, slots=True)
class Exit:
    """A main process ended and the rest of its tree is gone. `code` is None for an adopted process."""

    instance: str
    pid: int
    start_time: int
    code: int | None
    killed: tuple[int, ...]
    out_of_memory: bool = False

    @property
    def reason(self) -> str:
        """In words for people."""
        if self.out_of_memory:
            return "the engine was killed by the kernel: its container, or the machine, is out of memory"
        if self.code is None:
            return "the engine's process ended"
        if self.code < 0:
            return f"the engine was killed by signal {-self.code}"
        return f"the engine exited with status {self.code}"


@dataclass(frozen=True, slots=True)
class Running:
    """A living main process."""

    instance: str
    pid: int
    start_time: int


class SupervisorClient:
    """One connection; `lost` is set when it breaks, and every open call then raises Unavailable."""

    def __init__(self, on_exit: Callable[[Exit], None]) -> None:
        self._on_exit = on_exit
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()
        self.owner = ""

    async def connect(self, path: Path) -> None:
        """Raises Unavailable when nobody answers, InvalidInput when it speaks another version."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(path), limit=wire.MAX_LINE)
        except OSError as error:
            raise Unavailable(f"no supervisor at {path}: {error.strerror}", retry_after=0.1) from error
        writer.write(wire.encode(wire.hello()))
        try:
            line = await reader.readline()
        except OSError:
            # It died between accepting and greeting.
            line = b""
        if not line:
            writer.close()
            raise Unavailable(f"the supervisor at {path} hung up", retry_after=0.1)
        greeting = wire.decode(line)
        wire.check_hello(greeting)
        self.owner = str(greeting.get("owner", ""))
        self._writer = writer
        self._task = asyncio.create_task(self._read(reader), name="supervisor-reader")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = wire.decode(line)
                if message.get("event") == "exit":
                    self._on_exit(
                        Exit(
                            message["instance"], message["pid"], message["start_time"], message["code"],
                            tuple(message["killed"]), message.get("out_of_memory", False),
                        )
                    )  # fmt: skip
                else:
                    future = self._open.pop(message.get("id", 0), None)
                    if future is not None and not future.done():
                        future.set_result(message)
        except (OSError, InvalidInput, ValueError):
            pass
        finally:
            self.lost.set()
            for future in self._open.values():
                if not future.done():
                    future.set_exception(Unavailable("the supervisor went away", retry_after=0.2))
            self._open.clear()
            if self._writer is not None:
                self._writer.close()

    async def _call(self, operation: str, **fields: Any) -> dict[str, Any]:
        if self._writer is None or self.lost.is_set():
            raise Unavailable("the supervisor is not connected", retry_after=0.2)
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        self._writer.write(wire.encode({"id": number, "op": operation, **fields}))
        try:
            reply = await future
        finally:
            self._open.pop(number, None)
        if not reply["ok"]:
            raise _ERRORS.get(reply["code"], RelightError)(reply["error"])
        return reply

    async def spawn(self, instance: str, argv: tuple[str, ...], env: dict[str, str], cwd: Path, log: Path) -> Running:
        """Starts an instance's main process. Raises Conflict, InvalidInput, Unavailable."""
        reply = await self._call("spawn", instance=instance, argv=list(argv), env=env, cwd=str(cwd), log=str(log))
        return Running(instance, reply["pid"], reply["start_time"])

    async def adopt(self, instance: str, pid: int) -> Running:
        """It answers for a process that was forked elsewhere. Raises Conflict, NotFound, InvalidInput, Unavailable."""
        reply = await self._call("adopt", instance=instance, pid=pid)
        return Running(instance, reply["pid"], reply["start_time"])

    async def list(self) -> tuple[Running, ...]:
        """Every instance whose main process lives."""
        reply = await self._call("list")
        return tuple(Running(i["instance"], i["pid"], i["start_time"]) for i in reply["instances"])

    async def environment(self) -> dict[str, str]:
        """The supervisor's own variables: those of the container that engines run in. Raises InvalidInput from one that
        is too old to be asked."""
        reply = await self._call("environment")
        return dict(reply["environment"])

    async def end(self, instance: str, grace_seconds: float) -> None:
        """Returns when the whole tree is gone; a tree that is gone already is no error."""
        with contextlib.suppress(NotFound):
            await self._call("end", instance=instance, grace_seconds=grace_seconds)

    async def shutdown(self, grace_seconds: float) -> None:
        """Ends every instance and then the supervisor itself."""
        await self._call("shutdown", grace_seconds=grace_seconds)

    async def close(self) -> None:
        """Drops the connection; everything runs on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def launch(socket_path: Path, journal: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts a supervisor that outlives this process. It ends at once when another holds the journal."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            [
                sys.executable, "-m", "relight.agent.supervisor", "--socket", str(socket_path),
                "--journal", str(journal),
            ],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", start_new_session=True,
            env={**os.environ},
        )  # fmt: skip
