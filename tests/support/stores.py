"""A store that fails on command."""

from collections.abc import Mapping, Sequence

from relight.controller.state.base import Entry, Lease, Store, Write
from relight.core.errors import Unavailable


class FaultyStore:
    """Its next commits fail as told: `failed` (nothing done) or `lost-reply` (done, reported failed)."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.faults: list[str] = []

    async def commit(
        self, writes: Sequence[Write], *, expect: Mapping[str, int] | None = None, fence: Lease | None = None
    ) -> int:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "failed":
            raise Unavailable("injected: nothing was done")
        revision = await self.inner.commit(writes, expect=expect, fence=fence)
        if fault == "lost-reply":
            raise Unavailable("injected: the reply was lost")
        return revision

    async def get(self, key: str) -> Entry | None:
        return await self.inner.get(key)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)
