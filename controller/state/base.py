"""The store's protocol: atomic compare-and-set over keys, one growing revision, watches, fenced leases.

Every single write takes a revision of its own, so that a watcher that resumes from a revision misses and
repeats nothing; the writes of one commit take consecutive revisions and become visible together.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

ABSENT = 0
"""As an expected revision: the key must not exist."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as stored; `revision` is that of its last write."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Write:
    """What a commit does to one key: `value` None deletes it."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Change:
    """One write as a watcher sees it; `value` None is a deletion."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A held lease. `epoch` grows with every acquisition, whoever acquires: it fences earlier holders."""

    name: str
    holder: str
    epoch: int
    expires_at: float
    """Seconds since the Unix epoch, on the holder's clock: the store lets it go no sooner."""


class Store(Protocol):
    """One implementation per kind of database; tests/contract holds all of them to the same behaviour."""

    async def get(self, key: str) -> Entry | None:
        """The key's newest entry. Raises Unavailable."""
        ...

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        """All entries below `prefix` in key order, and the store's revision at that moment."""
        ...

    async def commit(
        self, writes: Sequence[Write], *, expect: Mapping[str, int] | None = None, fence: Lease | None = None
    ) -> int:
        """Does all writes or none; returns the store's revision after it.

        `expect` maps keys to the revision that they must have (ABSENT: must not exist). With `fence`, the
        lease must still be the newest of its name. Raises Conflict, Fenced, Unavailable; on Unavailable
        the writes may or may not have been done, and the caller reads before it decides.
        """
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        """Every change below `prefix` after `from_revision`, in order, each once; never ends by itself.

        Raises TooOld when `from_revision` was compacted, or lies ahead of this store (it went back in time).
        """
        ...

    async def acquire(self, name: str, holder: str, ttl_seconds: float, *, above_epoch: int = 0) -> Lease:
        """Takes a lease that is free, expired, or held by the same holder; its epoch exceeds `above_epoch`.

        Raises Conflict, naming the holder and the remaining time, when another holds it.
        """
        ...

    async def renew(self, lease: Lease, ttl_seconds: float) -> Lease:
        """Prolongs a lease that nobody has taken since. Raises Fenced."""
        ...

    async def release(self, lease: Lease) -> None:
        """Gives the lease up; its epoch is remembered. A lease that another took since is left alone."""
        ...

    async def compact(self, revision: int) -> None:
        """Forgets the history up to `revision`; present values stay."""
        ...

    async def close(self) -> None:
        """Ends all watches and lets the database go."""
        ...
