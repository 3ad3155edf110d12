"""Which other slots' engines this slot can really read, and by what: tried door by door, rarely, and told.

A door is tried when it is new, and again when its verdict is old. A door that is not reached is tried twice before that
counts: its engine may just have ended. The first failure is told as unknown, and the controller then tells at once
where that engine is read now. One that is there and refuses says nothing about the way to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from relight.core.clock import Clock
from relight.core.errors import InvalidInput, RelightError, TransferError
from relight.core.logs import get_logger
from relight.core.records import Door, Neighbours, Reach, Verdict
from relight.transfer.transports.wire import Refused

_log = get_logger("agent.reach")
SPACING = 5.0
"""Seconds between two tries of a slot, on average: at most twelve a minute, whatever the number of slots."""
OLD = 900.0
"""Seconds after which a way that was open is tried again."""
DOUBTED = 120.0
"""The same of one that was not: a plan avoids it meanwhile."""
TRIES = 2
"""Failures in a row after which a way counts as closed."""
MOST = 64
"""Doors that one slot looks at."""
REASON = 2000
"""Characters of a reason."""

Knock = Callable[[Door], Awaitable[str]]
"""Tries one door, and says how it was reached."""


@dataclass(slots=True)
class _Way:
    door: Door
    told: Reach | None = None
    failures: int = 0
    due: float = 0.0
    """Monotonic."""


class Ways:
    """All calls come from one event loop, but for `knock`'s own work."""

    def __init__(
        self, slot: str, knock: Knock, clock: Clock, changed: Callable[[], None],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        """`changed` is told whenever `report` would differ. Each slot has a rhythm of its own, by its name."""
        self._knock, self._clock, self._changed, self._sleep = knock, clock, changed, sleep
        self._dice = random.Random(slot)  # noqa: S311 - a rhythm, and no secret
        self._ways: dict[tuple[str, str], _Way] = {}
        self._revision = -1
        self._heard = asyncio.Event()

    def hear(self, neighbours: Neighbours) -> None:
        """The controller's word on whose doors to try; verdicts of others are forgotten."""
        if neighbours.revision == self._revision:
            return
        self._revision = neighbours.revision
        before, self._ways = self._ways, {}
        for door in neighbours.doors[:MOST]:
            way = before.get((door.slot, door.transport)) or _Way(door)
            if way.door.address != door.address:
                # Another engine, or the same one after a sleep: where it is read has changed.
                way.failures, way.due = 0, 0.0
            way.door = door
            self._ways[door.slot, door.transport] = way
        self._heard.set()
        if before.keys() - self._ways.keys():
            self._changed()

    def doubt(self, transport: str) -> None:
        """Something about this slot's own end has changed: its ways by `transport` are tried again soon."""
        for way in self._ways.values():
            if way.door.transport == transport:
                way.failures, way.due = 0, 0.0
        self._heard.set()

    def report(self) -> tuple[Reach, ...]:
        """The newest verdicts, by slot and transport."""
        return tuple(way.told for _, way in sorted(self._ways.items()) if way.told is not None)

    async def keep(self) -> None:
        """Runs for ever."""
        while True:
            self._heard.clear()
            now = self._clock.monotonic()
            due = min(self._ways.values(), key=lambda way: way.due, default=None)
            if due is None or due.due > now:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if due is None else due.due - now):
                        await self._heard.wait()
                continue
            await self._try(due)
            await self._sleep(SPACING * self._dice.uniform(0.5, 1.5))

    async def _try(self, way: _Way) -> None:
        door = way.door
        try:
            verdict, reason = Verdict.YES, await self._knock(door)
        except (Refused, InvalidInput) as error:
            # What it is reached by will be told anew: until then the last verdict stands.
            _log.info("reach.refused", slot=door.slot, transport=door.transport, reason=str(error))
            way.due = self._clock.monotonic() + DOUBTED
            return
        except (TransferError, RelightError, OSError) as error:
            way.failures += 1
            verdict, reason = Verdict.NO, str(error)[:REASON]
        else:
            way.failures = 0
        wait = (OLD if verdict is Verdict.YES else DOUBTED) * self._dice.uniform(0.8, 1.2)
        if 0 < way.failures < TRIES:
            wait, verdict = SPACING, Verdict.UNKNOWN
        way.due = self._clock.monotonic() + wait
        before, way.told = way.told, Reach(door.slot, door.transport, verdict, reason, self._clock.now())
        if before is None or before.verdict is not verdict:
            log = _log.info if verdict is Verdict.YES else _log.warning
            log("reach.told", slot=door.slot, transport=door.transport, verdict=verdict, reason=reason)
        self._changed()
