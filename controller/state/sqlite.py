"""The embedded store: SQLite in WAL mode, one process at a time, synced before it acknowledges."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from relight.controller.state.base import ABSENT, Change, Entry, Lease, Write
from relight.core.clock import Clock
from relight.core.errors import Conflict, Fenced, TooOld, Unavailable

T = TypeVar("T")

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (revision INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB);
CREATE TABLE IF NOT EXISTS leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, epoch INTEGER NOT NULL,
    expires_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO meta VALUES ('revision', 0), ('compacted', 0);
"""
_BATCH = 256


def _after(prefix: str) -> str:
    """The smallest text greater than every text that begins with `prefix`."""
    return prefix + "\U0010ffff"


class SqliteStore:
    """See Store. Database calls run in one worker thread, so that a slow disk never stops the event loop.

    A lock beside the file keeps a second process out: the leases and watches of this store are for the
    processes of one machine taking turns, not for several at once.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        """Opens or creates the file at `path` (mode 0600). Raises Conflict when another process has it."""
        self._clock = clock
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._changed = asyncio.Event()
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Conflict(f"another process has the state {path} open") from None
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        self._db.execute("PRAGMA journal_mode=WAL")
        # FULL: an acknowledged commit survives the loss of power too, for about 0.2 ms.
        self._db.execute("PRAGMA synchronous=FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _SCHEMA_VERSION):
            self._db.close()
            os.close(self._lock)
            raise Conflict(f"{path} has schema {version}, this version knows {_SCHEMA_VERSION} only")
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise Unavailable("the store is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except sqlite3.Error as error:
            raise Unavailable(f"the store failed: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _meta(self, name: str) -> int:
        (value,) = self._db.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
        return int(value)

    async def get(self, key: str) -> Entry | None:
        def work() -> Entry | None:
            row = self._db.execute("SELECT value, revision FROM entries WHERE key=?", (key,)).fetchone()
            return Entry(key, row[0], row[1]) if row else None

        return await self._run(work)

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        def work() -> tuple[list[Entry], int]:
            with self._transaction() as db:
                rows = db.execute(
                    "SELECT key, value, revision FROM entries WHERE key>=? AND key<? ORDER BY key",
                    (prefix, _after(prefix)),
                ).fetchall()
                return [Entry(*row) for row in rows], self._meta("revision")

        return await self._run(work)

    async def commit(
        self, writes: Sequence[Write], *, expect: Mapping[str, int] | None = None, fence: Lease | None = None
    ) -> int:
        def work() -> int:
            with self._transaction() as db:
                if fence is not None:
                    self._check_fence(fence)
                for key, wanted in (expect or {}).items():
                    row = db.execute("SELECT revision FROM entries WHERE key=?", (key,)).fetchone()
                    present = row[0] if row else ABSENT
                    if present != wanted:
                        raise Conflict(f"{key} is at revision {present}, not at {wanted}")
                revision = self._meta("revision")
                for write in writes:
                    revision += 1
                    db.execute("INSERT INTO changes VALUES (?,?,?)", (revision, write.key, write.value))
                    if write.value is None:
                        db.execute("DELETE FROM entries WHERE key=?", (write.key,))
                    else:
                        db.execute(
                            "INSERT INTO entries VALUES (?,?,?) ON CONFLICT (key) DO UPDATE SET "
                            "value=excluded.value, revision=excluded.revision",
                            (write.key, write.value, revision),
                        )
                db.execute("UPDATE meta SET value=? WHERE name='revision'", (revision,))
                return revision

        revision = await self._run(work)
        self._wake_watchers()
        return revision

    def _wake_watchers(self) -> None:
        # A fresh event per change: each watcher waits on the one it saw before it read, so none is missed.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        after = from_revision

        def work() -> tuple[list[Change], int]:
            with self._transaction() as db:
                newest, compacted = self._meta("revision"), self._meta("compacted")
                if after < compacted or after > newest:
                    raise TooOld(f"revision {after} is not in the history, which has {compacted} to {newest}")
                rows = db.execute(
                    "SELECT key, value, revision FROM changes WHERE revision>? ORDER BY revision LIMIT ?",
                    (after, _BATCH),
                ).fetchall()
                return [Change(*row) for row in rows], rows[-1][2] if rows else after

        while not self._closed:
            changed = self._changed
            found, after = await self._run(work)
            for change in found:
                if change.key.startswith(prefix):
                    yield change
            if not found:
                await changed.wait()

    def _check_fence(self, lease: Lease) -> None:
        row = self._db.execute("SELECT holder, epoch FROM leases WHERE name=?", (lease.name,)).fetchone()
        if row is None or row != (lease.holder, lease.epoch):
            newest = f"{row[0]} holds epoch {row[1]}" if row else "nobody holds it"
            raise Fenced(f"lease {lease.name}, epoch {lease.epoch} of {lease.holder}, is over: {newest}")

    def _put_lease(self, lease: Lease) -> None:
        self._db.execute(
            "INSERT INTO leases VALUES (?,?,?,?) ON CONFLICT (name) DO UPDATE SET holder=excluded.holder, "
            "epoch=excluded.epoch, expires_at=excluded.expires_at",
            (lease.name, lease.holder, lease.epoch, lease.expires_at),
        )

    async def acquire(self, name: str, holder: str, ttl_seconds: float, *, above_epoch: int = 0) -> Lease:
        def work() -> Lease:
            with self._transaction() as db:
                now = self._clock.now()
                row = db.execute("SELECT holder, epoch, expires_at FROM leases WHERE name=?", (name,)).fetchone()
                held_by, epoch, expires_at = row or ("", 0, 0.0)
                if held_by not in ("", holder) and expires_at > now:
                    raise Conflict(f"lease {name} is held by {held_by} for {expires_at - now:.1f} s more")
                lease = Lease(name, holder, max(epoch, above_epoch) + 1, now + ttl_seconds)
                self._put_lease(lease)
                return lease

        return await self._run(work)

    async def renew(self, lease: Lease, ttl_seconds: float) -> Lease:
        def work() -> Lease:
            with self._transaction():
                self._check_fence(lease)
                renewed = Lease(lease.name, lease.holder, lease.epoch, self._clock.now() + ttl_seconds)
                self._put_lease(renewed)
                return renewed

        return await self._run(work)

    async def release(self, lease: Lease) -> None:
        def work() -> None:
            with self._transaction() as db:
                db.execute(
                    "UPDATE leases SET holder='', expires_at=0 WHERE name=? AND holder=? AND epoch=?",
                    (lease.name, lease.holder, lease.epoch),
                )

        await self._run(work)

    async def compact(self, revision: int) -> None:
        def work() -> None:
            with self._transaction() as db:
                upto = min(max(revision, self._meta("compacted")), self._meta("revision"))
                db.execute("DELETE FROM changes WHERE revision<=?", (upto,))
                db.execute("UPDATE meta SET value=? WHERE name='compacted'", (upto,))

        await self._run(work)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake_watchers()
        await asyncio.get_running_loop().run_in_executor(self._worker, self._db.close)
        self._worker.shutdown(wait=False)
        os.close(self._lock)
