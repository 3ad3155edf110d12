"""The tokenizer's side: it holds requests back while it is paused, and `abort` pauses nothing but it."""

from __future__ import annotations

import asyncio
import itertools

from .scheduler import Request, Scheduler


class Tokenizer:
    """`status` is Starting, Up or UnHealthy."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.status = "Starting"
        self.paused = False
        self._moved = asyncio.Condition()
        self._open: set[Request] = set()
        self._numbers = itertools.count(1)

    @property
    def ready(self) -> bool:
        return not self.paused and self.status == "Up"

    async def generate(self, prompt: list[int], count: int, rid: str = "") -> Request:
        """Waits for as long as it is paused, then for the answer."""
        async with self._moved:
            await self._moved.wait_for(lambda: not self.paused)
        request = Request(rid or f"r{next(self._numbers)}", prompt, count)
        self._open.add(request)
        try:
            self._scheduler.add(request)
            await request.ended.wait()
        finally:
            self._open.discard(request)
        return request

    async def pause(self, mode: str) -> None:
        async with self._moved:
            self.paused = True
            if mode != "abort":
                # Sent, and not waited for: calls to the scheduler keep their order.
                self._scheduler.pause(mode)
                return
            while True:
                self._scheduler.abort_all()
                if not self._open:
                    return
                await asyncio.sleep(0.01)

    async def resume(self) -> None:
        async with self._moved:
            self.paused = False
            self._scheduler.engine_paused = False
            self._moved.notify_all()
