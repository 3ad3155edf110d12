"""What the agent says to a copy's process over its socket; every call has a deadline, every answer is checked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relight.agent.hostcopy.orders import MAX_LINE, Fill, dump
from relight.core.errors import InvalidInput, LocalFault
from relight.core.records import HostContent, HostState, SourceOffer
from relight.protos.convert import from_dict

SECONDS = 5.0
EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Said:
    """What a copy says of itself; one that was never asked to read anything is `empty` and has no content."""

    pid: int
    copy: str
    state: str
    reason: str
    content: HostContent | None
    placed: int
    total: int
    bytes: int
    source: SourceOffer | None
    readers: int = 0
    """Who is copying it, or has its pages mapped."""

    @property
    def ready(self) -> bool:
        """Whether it can be read."""
        return self.state == HostState.READY and self.source is not None


async def describe(socket: Path) -> Said:
    """Raises LocalFault when it does not answer."""
    return await _ask(socket, {"describe": {}})


async def fill(socket: Path, order: Fill) -> Said:
    """Has it begin to read. Raises LocalFault when it does not answer or refuses."""
    return await _ask(socket, {"fill": dump(order)})


async def _ask(socket: Path, question: dict[str, Any]) -> Said:
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(socket), limit=MAX_LINE)
            writer.write(json.dumps(question).encode() + b"\n")
            said = json.loads(await reader.readline())
        if isinstance(said, dict) and "refused" in said:
            raise LocalFault(f"the copy refuses: {said['refused']}")
        return from_dict(said, Said, "host copy")
    except TimeoutError:
        raise LocalFault(f"the copy did not answer within {SECONDS:g} s") from None
    except (OSError, ValueError, InvalidInput) as error:
        raise LocalFault(f"the copy cannot be asked: {type(error).__name__} {error}") from error
    finally:
        if writer is not None:
            writer.close()
