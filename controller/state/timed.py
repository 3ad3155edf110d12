"""A store that tells how long each of its calls took."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from relight.controller.state.base import Change, Entry, Lease, Store, Write
from relight.core.clock import Clock
from relight.core.errors import Conflict

Told = Callable[[str, str, float], None]
"""Hears of each call: its name, how it ended (ok, conflict, failed), and the seconds that it took."""


class TimedStore:
    """Implements Store by another one. Watches, which never end, are not timed."""

    def __init__(self, store: Store, told: Told, clock: Clock) -> None:
        self._store, self._told, self._clock = store, told, clock

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        begun, outcome = self._clock.monotonic(), "failed"
        try:
            yield
            outcome = "ok"
        except Conflict:
            outcome = "conflict"
            raise
        finally:
            self._told(operation, outcome, self._clock.monotonic() - begun)

    async def get(self, key: str) -> Entry | None:
        with self._timed("get"):
            return await self._store.get(key)

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        with self._timed("list"):
            return await self._store.list(prefix)

    async def commit(
        self, writes: Sequence[Write], *, expect: Mapping[str, int] | None = None, fence: Lease | None = None
    ) -> int:
        with self._timed("commit"):
            return await self._store.commit(writes, expect=expect, fence=fence)

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        return self._store.watch(prefix, from_revision)

    async def acquire(self, name: str, holder: str, ttl_seconds: float, *, above_epoch: int = 0) -> Lease:
        with self._timed("acquire"):
            return await self._store.acquire(name, holder, ttl_seconds, above_epoch=above_epoch)

    async def renew(self, lease: Lease, ttl_seconds: float) -> Lease:
        with self._timed("renew"):
            return await self._store.renew(lease, ttl_seconds)

    async def release(self, lease: Lease) -> None:
        with self._timed("release"):
            await self._store.release(lease)

    async def compact(self, revision: int) -> None:
        with self._timed("compact"):
            await self._store.compact(revision)

    async def close(self) -> None:
        await self._store.close()
