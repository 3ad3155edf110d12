"""Reads checkpoints ahead, so that a first start reads memory: those on disk into the system's page cache, those of
remote storage into memory of this slot's budget."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from relight.agent.storage.checkpoints import Checkpoints
from relight.core.errors import LocalFault, RelightError
from relight.core.logs import get_logger
from relight.core.records import Prefetch, PrefetchReport, Storage

_log = get_logger("agent.prefetch")
SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
STEP = 4 << 20
"""Bytes of one read: the most that is read after nobody wants it any more."""

FETCH_SECONDS = 3600.0
"""How long remote storage may take with a checkpoint that nobody waits for."""
NEWS = 256 << 20
"""Bytes between two reports of how far it is."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint."""

    path: Path
    bytes: int


def files_of(uri: str) -> tuple[File, ...]:
    """The files of a checkpoint's directory that hold weights, by name. Raises LocalFault when there is none."""
    try:
        found = [p for p in sorted(Path(uri).iterdir()) if p.suffix in SUFFIXES and p.is_file()]
        files = tuple(File(p, p.stat().st_size) for p in found)
    except (OSError, ValueError) as error:
        raise LocalFault(f"{uri}: {getattr(error, 'strerror', None) or error}") from error
    if not files:
        raise LocalFault(f"{uri}: no file of weights there")
    return files


def read_ahead(files: Sequence[File], most: int, over: Callable[[], bool], say: Callable[[int], None]) -> int:
    """Reads `files` in order, at most `most` bytes of them, until `over`; returns how many. Raises LocalFault.

    They are read, not only asked for: what is only asked for may be cut to the device's own read-ahead.
    """
    buffer, done = bytearray(STEP), 0
    for file in files:
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LocalFault(f"{file.path}: {error.strerror}") from error
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            offset = 0
            while done < most and not over():
                view = memoryview(buffer)[: min(STEP, most - done)]
                got = os.preadv(descriptor, [view], offset)
                if not got:
                    break
                offset, done = offset + got, done + got
                say(done)
        except OSError as error:
            raise LocalFault(f"{file.path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
    return done


class Prefetcher:
    """One checkpoint at a time; each content once. All calls come from one event loop."""

    def __init__(
        self, room: Callable[[], int], changed: Callable[[], None], checkpoints: Checkpoints | None = None
    ) -> None:
        """`room` says how many bytes of the budget are left; `changed` is told when `reports` would differ. What lies
        in remote storage is read into `checkpoints`."""
        self._room, self._changed, self._checkpoints = room, changed, checkpoints
        self._wanted: tuple[Prefetch, ...] = ()
        self._done: dict[tuple[str, str], PrefetchReport] = {}
        self._wake = asyncio.Event()

    def hear(self, wanted: Sequence[Prefetch]) -> None:
        """What shall be read ahead; what is not named is forgotten, and ends if it is being read."""
        self._wanted = tuple(wanted)
        self._done = {key: r for key, r in self._done.items() if key in map(_key, wanted)}
        if self._checkpoints is not None:
            self._checkpoints.keep([_key(w) for w in wanted if w.storage])
        self._wake.set()

    def reports(self) -> tuple[PrefetchReport, ...]:
        """How far each is."""
        return tuple(self._done[key] for key in sorted(self._done))

    async def keep(self) -> None:
        """Runs for ever."""
        while True:
            self._wake.clear()
            while (wanted := next((w for w in self._wanted if _key(w) not in self._done), None)) is not None:
                await (self.read(wanted) if wanted.storage is None else self._fetch(wanted, wanted.storage))
            await self._wake.wait()

    async def read(self, wanted: Prefetch) -> None:
        """Reads one, as far as the budget goes."""
        loop, ended = asyncio.get_running_loop(), threading.Event()
        left = self._room() - sum(r.bytes for r in self._done.values())
        self._put(wanted, PrefetchReport(wanted.model, wanted.revision, 0, 0))

        def over() -> bool:
            return ended.is_set() or wanted not in self._wanted

        said = 0

        def say(done: int) -> None:
            nonlocal said
            if done - said >= NEWS and not ended.is_set():
                said = done
                loop.call_soon_threadsafe(self._move, wanted, done)

        try:
            files = await asyncio.to_thread(files_of, wanted.uri)
            total = sum(f.bytes for f in files)
            self._put(wanted, PrefetchReport(wanted.model, wanted.revision, 0, total))
            done = await asyncio.to_thread(read_ahead, files, max(left, 0), over, say)
            why = "" if done >= total else f"the budget has {max(left, 0)} bytes left for it"
            self._put(wanted, PrefetchReport(wanted.model, wanted.revision, done, total, why))
            _log.info("prefetch.read", model=wanted.model, bytes=done, total=total, reason=why)
        except LocalFault as error:
            self._put(wanted, PrefetchReport(wanted.model, wanted.revision, 0, 0, str(error)))
            _log.warning("prefetch.failed", model=wanted.model, reason=str(error))
        finally:
            # A cancelled agent does not wait for a thread that reads on.
            ended.set()

    async def _fetch(self, wanted: Prefetch, storage: Storage) -> None:
        """Reads one from remote storage into memory, if all of it fits."""
        told = PrefetchReport(wanted.model, wanted.revision, 0, 0)
        self._put(wanted, told)

        def say(done: int, total: int) -> None:
            nonlocal told
            told = replace(told, bytes=done, total=total)
            self._put(wanted, told)

        if self._checkpoints is None:
            return
        try:
            async with self._checkpoints.held(_key(wanted), storage, FETCH_SECONDS, say):
                pass
        except RelightError as error:
            self._put(wanted, replace(told, bytes=0, reason=str(error)))
            _log.warning("prefetch.failed", model=wanted.model, reason=str(error))

    def _move(self, wanted: Prefetch, done: int) -> None:
        known = self._done.get(_key(wanted))
        if known is not None:
            self._put(wanted, replace(known, bytes=done))

    def _put(self, wanted: Prefetch, report: PrefetchReport) -> None:
        if wanted in self._wanted:
            self._done[_key(wanted)] = report
            self._changed()


def _key(wanted: Prefetch) -> tuple[str, str]:
    return wanted.model, wanted.revision
