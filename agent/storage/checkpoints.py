"""Checkpoints of remote storage that are in this agent's memory now: fetched once for all who want them, one at a time.

They are a directory of links to files in the agent's memory, which engines read as a checkpoint on disk. They stay
while somebody reads them or they were fetched ahead; an engine or a copy that has the weights is what lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from relight.agent.storage.fetch import File, fetch, release
from relight.agent.storage.remote import Limits, shown
from relight.core.clock import Clock
from relight.core.errors import RemoteFault
from relight.core.fingerprint import digest
from relight.core.logs import get_logger
from relight.core.records import Storage

_log = get_logger("agent.storage")
NEWS = 64 << 20
"""Bytes between two words on how far it is."""
Key = tuple[str, str]
"""Model and revision."""
Say = Callable[[int, int], None]
"""Hears, on the event loop, bytes that came and bytes there are."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checkpoint in memory: `directory` holds its files of weights; `told` says whence, how much and how fast."""

    directory: Path
    files: tuple[File, ...]
    told: str


@dataclass(slots=True, eq=False)
class _Entry:
    task: asyncio.Task[Fetched]
    limits: Limits
    users: int = 0
    bytes: int = 0
    listeners: list[Say] = field(default_factory=list)


class Checkpoints:
    """All calls come from one event loop."""

    def __init__(self, directory: Path, room: Callable[[], int], clock: Clock) -> None:
        """`room` says how many bytes of the slot's budget are left; what lay in `directory` is gone."""
        self._directory, self._room, self._clock = directory, room, clock
        self._entries: dict[Key, _Entry] = {}
        self._kept: frozenset[Key] = frozenset()
        self._one = asyncio.Lock()
        # Links of an earlier agent, to memory that went with it.
        shutil.rmtree(directory, ignore_errors=True)

    @property
    def bytes(self) -> int:
        """What they take, or are about to."""
        return sum(entry.bytes for entry in self._entries.values())

    def keep(self, ahead: Collection[Key]) -> None:
        """These stay when nobody reads them; all others go then."""
        self._kept = frozenset(ahead)
        self._sweep()

    def shed(self) -> None:
        """Gives up those that nobody reads: their memory is wanted for something that lasts."""
        self._kept = frozenset()
        self._sweep()

    @contextlib.asynccontextmanager
    async def held(self, key: Key, storage: Storage, seconds: float, say: Say) -> AsyncIterator[Fetched]:
        """The checkpoint, which stays while this is entered. Raises RemoteFault or LocalFault when it does not come
        within `seconds`."""
        entry = self._entries.get(key)
        if entry is None:
            limits = Limits(self._clock, self._clock.monotonic() + seconds)
            entry = self._entries[key] = _Entry(asyncio.create_task(self._fetch(key, storage, limits)), limits)
        entry.users += 1
        entry.listeners.append(say)
        try:
            try:
                async with asyncio.timeout(seconds):
                    fetched = await asyncio.shield(entry.task)
            except TimeoutError:
                raise RemoteFault(f"{shown(storage.uri)} was not read within {seconds:.0f} s") from None
            yield fetched
        finally:
            entry.users -= 1
            entry.listeners.remove(say)
            self._sweep()

    def close(self) -> None:
        """Stops what is being read, and gives all memory back."""
        self._kept = frozenset()
        for entry in self._entries.values():
            entry.users = 0
        self._sweep()

    # ------------------------------------------------------------------ inside

    async def _fetch(self, key: Key, storage: Storage, limits: Limits) -> Fetched:
        loop, said = asyncio.get_running_loop(), -NEWS

        def say(done: int, total: int) -> None:
            nonlocal said
            if done - said >= NEWS or done == total:
                said = done
                loop.call_soon_threadsafe(self._told, key, done, total)

        async with self._one:
            begun = self._clock.monotonic()
            files = await asyncio.to_thread(fetch, storage.uri, storage.sha256, max(self._room(), 0), limits, say)
        size, took = sum(f.bytes for f in files), self._clock.monotonic() - begun
        told = f"{size} bytes in {len(files)} files from {shown(storage.uri)}, {took:.2f} s"
        _log.info("storage.fetched", model=key[0], revision=key[1], bytes=size, seconds=round(took, 3))
        return Fetched(self._linked(key, files), files, told)

    def _linked(self, key: Key, files: tuple[File, ...]) -> Path:
        directory = self._directory / digest({"model": key[0], "revision": key[1]})
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        for file in files:
            (directory / file.name).symlink_to(f"/proc/{os.getpid()}/fd/{file.descriptor}")
        return directory

    def _told(self, key: Key, done: int, total: int) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.bytes = total
            for say in entry.listeners:
                say(done, total)

    def _sweep(self) -> None:
        for key, entry in list(self._entries.items()):
            failed = entry.task.done() and (entry.task.cancelled() or entry.task.exception() is not None)
            if entry.users or (key in self._kept and not failed):
                continue
            del self._entries[key]
            # A fetch that is under way ends at its next piece, in its own thread.
            entry.limits.over.set()
            entry.task.add_done_callback(_gone)


def _gone(task: asyncio.Task[Fetched]) -> None:
    if not task.cancelled() and task.exception() is None:
        release(task.result().files)
        shutil.rmtree(task.result().directory, ignore_errors=True)
