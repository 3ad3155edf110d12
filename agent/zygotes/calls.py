"""What the agent says to a zygote over its socket (plugin/zygote); every call has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relight.agent.engines.base import EngineCommand
from relight.core.errors import LocalFault

FORK_SECONDS = 10.0
"""A fork takes some hundredths of a second; one that takes this long hangs."""
DESCRIBE_SECONDS = 5.0


class Stale(LocalFault):
    """The zygote is not what it should be: another one would be."""


@dataclass(frozen=True, slots=True)
class Described:
    """What a zygote says of itself."""

    pid: int
    imported_seconds: float
    resident_bytes: int
    models: tuple[str, ...] = ()
    """Those that are prepared, by the command line that their engines have in common."""


async def describe(socket: Path) -> Described:
    """Raises Stale when it does not answer."""
    async with _connected(socket, DESCRIBE_SECONDS) as (reader, writer):
        said = await _say(reader, writer, {"describe": {}})
        seconds, resident = float(said["imported_seconds"]), int(said["resident_bytes"])
        return Described(int(said["pid"]), seconds, resident, tuple(said["models"]))


@dataclass(frozen=True, slots=True)
class Forked:
    """An engine's main process, and whether its model had been prepared."""

    pid: int
    prepared: bool


async def prepare(socket: Path, command: EngineCommand, log: Path) -> None:
    """Has the zygote read the model of such an engine, for its next forks; it goes on by itself. Raises LocalFault."""
    async with _connected(socket, DESCRIBE_SECONDS) as (reader, writer):
        _granted(await _say(reader, writer, {"prepare": _ask(command, log)}))


async def fork(socket: Path, command: EngineCommand, log: Path, take: Callable[[int], Awaitable[None]]) -> Forked:
    """Forks an engine, has `take` answer for its pid, and only then lets it go on.

    Whatever is raised (LocalFault, Stale, or what `take` raises), nothing of it is left running.
    """
    async with _connected(socket, FORK_SECONDS) as (reader, writer):
        said = _granted(await _say(reader, writer, {"fork": _ask(command, log)}))
        pid = int(said["pid"])
        # Not until somebody would end it: it waits for this line, and exits when the connection breaks instead.
        await take(pid)
        writer.write(b"go\n")
        with contextlib.suppress(OSError):
            await writer.drain()
        return Forked(pid, bool(said.get("model")))


def _ask(command: EngineCommand, log: Path) -> dict[str, Any]:
    return {"argv": command.argv, "env": dict(command.env), "cwd": str(command.cwd), "log": str(log)}


def _granted(said: dict[str, Any]) -> dict[str, Any]:
    if "refused" in said:
        raise (Stale if said.get("stale") else LocalFault)(f"the zygote refuses: {said['refused']}")
    return said


@contextlib.asynccontextmanager
async def _connected(socket: Path, seconds: float) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            yield reader, writer
    except TimeoutError:
        raise Stale(f"the zygote did not answer within {seconds:g} s") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Stale(f"the zygote cannot be asked: {type(error).__name__} {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def _say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: dict[str, Any]) -> dict[str, Any]:
    writer.write(json.dumps(message).encode() + b"\n")
    line = await reader.readline()
    if not line:
        raise Stale("the zygote ended in the middle of it")
    said = json.loads(line)
    if not isinstance(said, dict):
        raise Stale("the zygote did not answer with an object")
    return said
