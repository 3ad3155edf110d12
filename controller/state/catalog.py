"""What the store says, decoded and in memory: filled once by a list, then kept by one watch.

There is one way in: a commit returns only when the watch has brought its writes, so that whoever reads
the catalog after its own commit finds it, and other writers' changes arrive in the same order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from relight.controller.flight.timeline import Expectation, Timeline
from relight.controller.state.base import Change, Lease, Store, Write
from relight.core.errors import TooOld, Unavailable
from relight.core.logs import get_logger
from relight.core.records import Assignment, Desired, Failure, HeldLevel, Mode, ModelSpec, Operation, Shapes
from relight.core.states import State

R = TypeVar("R")

log = get_logger("controller.catalog")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model as its owner wrote it, and when."""

    spec: ModelSpec
    changed_at: float


@dataclass(frozen=True, slots=True)
class Activity:
    """What demand alone did to a model's number since it was last written."""

    activated_at: float | None = None
    idled_at: float | None = None
    burst: tuple[HeldLevel, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredFailure:
    """That an instance failed to become what was desired: it holds its replacement back."""

    instance: str
    model: str
    desired: Desired
    failure: Failure
    at: float
    mode: Mode = Mode.COLD
    """By which mode it failed to come up: the next try takes a slower one. Cold also where it had come up before."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A slot that once attached: after a restart it is waited for before anything is scaled down."""

    slot: str
    host: str
    boot_id: str
    agent_address: str
    signers: tuple[str, ...] = ()
    """Public keys by which it seals bundles of the compile-cache ring, or once did; the newest first."""


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """The last observed state of an instance, for those who watch events."""

    instance: str
    model: str
    desired: Desired
    state: State
    cause: str
    slots: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """An idempotency key that was used: for which payload, and the operation that came of it."""

    payload: str
    operation: str
    at: float


@dataclass(frozen=True, slots=True)
class Versioned(Generic[R]):
    """A decoded record and the revision of its last write."""

    record: R
    revision: int


KINDS: Mapping[str, type[Any]] = {
    "models": StoredModel,
    "activity": Activity,
    "operations": Operation,
    "assignments": Assignment,
    "failures": StoredFailure,
    "slots": SlotFacts,
    "instances": InstanceStatus,
    "starts": Timeline,
    "expected": Expectation,
    "idempotency": Accepted,
    "shapes": Shapes,
}
# Made once, at import: making one takes tens of milliseconds, and the first request must not pay for it.
_ADAPTERS = {kind: TypeAdapter(record) for kind, record in KINDS.items()}


def put(kind: str, name: str, record: Any) -> Write:
    """The write that stores `record` as `kind`/`name`."""
    return Write(f"{kind}/{name}", json.dumps(asdict(record), separators=(",", ":")).encode())


def drop(kind: str, name: str) -> Write:
    """The write that deletes `kind`/`name`."""
    return Write(f"{kind}/{name}", None)


@dataclass(slots=True)
class _Tables:
    by_kind: dict[str, dict[str, Versioned[Any]]] = field(default_factory=lambda: {kind: {} for kind in KINDS})


class Catalog:
    """The decoded store. Read its tables freely; write only through `commit`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.revision = 0
        self.breaks = 0
        """How often the history broke off: what is stored now may be anything, or nothing."""
        self._tables = _Tables()
        self._listeners: list[Callable[[frozenset[str]], None]] = []
        self._arrived = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def models(self) -> Mapping[str, Versioned[StoredModel]]:
        """By `namespace/name`."""
        return self._tables.by_kind["models"]

    @property
    def activity(self) -> Mapping[str, Versioned[Activity]]:
        """By model key."""
        return self._tables.by_kind["activity"]

    @property
    def operations(self) -> Mapping[str, Versioned[Operation]]:
        """By operation id."""
        return self._tables.by_kind["operations"]

    @property
    def assignments(self) -> Mapping[str, Versioned[Assignment]]:
        """By slot."""
        return self._tables.by_kind["assignments"]

    @property
    def failures(self) -> Mapping[str, Versioned[StoredFailure]]:
        """By instance."""
        return self._tables.by_kind["failures"]

    @property
    def slots(self) -> Mapping[str, Versioned[SlotFacts]]:
        """By slot."""
        return self._tables.by_kind["slots"]

    @property
    def instances(self) -> Mapping[str, Versioned[InstanceStatus]]:
        """By instance."""
        return self._tables.by_kind["instances"]

    @property
    def starts(self) -> Mapping[str, Versioned[Timeline]]:
        """By timeline id; ids sort by time."""
        return self._tables.by_kind["starts"]

    @property
    def expected(self) -> Mapping[str, Versioned[Expectation]]:
        """What was expected of the last start of each instance, by instance."""
        return self._tables.by_kind["expected"]

    @property
    def idempotency(self) -> Mapping[str, Versioned[Accepted]]:
        """By `namespace/name/key digest`."""
        return self._tables.by_kind["idempotency"]

    @property
    def shapes(self) -> Mapping[str, Versioned[Shapes]]:
        """What the engines of a model ran, by model key."""
        return self._tables.by_kind["shapes"]

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Calls `listener` with the keys that changed, after each batch of changes."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Fills the tables, then follows the store until `stop`."""
        await self._fill()
        self._task = asyncio.create_task(self._follow(), name="catalog")

    async def stop(self) -> None:
        """Stops following; the tables stay as they are."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def commit(
        self, writes: Sequence[Write], *, expect: Mapping[str, int] | None = None, fence: Lease | None = None
    ) -> int:
        """As Store.commit, and waits until this catalog shows the writes."""
        revision = await self.store.commit(writes, expect=expect, fence=fence)
        await self.reached(revision)
        return revision

    async def reached(self, revision: int) -> None:
        """Waits until the catalog has seen `revision`."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.revision >= revision)

    async def _fill(self) -> None:
        entries, revision = await self.store.list("")
        before = self._names()
        self._tables = _Tables()
        for entry in entries:
            self._take(Change(entry.key, entry.value, entry.revision))
        self.revision = revision
        self._tell(before | self._names())
        async with self._arrived:
            self._arrived.notify_all()

    def _names(self) -> set[str]:
        return {f"{kind}/{name}" for kind, table in self._tables.by_kind.items() for name in table}

    async def _follow(self) -> None:
        while True:
            try:
                async for change in self.store.watch("", self.revision):
                    self._take(change)
                    self.revision = change.revision
                    self._tell((change.key,))
                    async with self._arrived:
                        self._arrived.notify_all()
                return
            except TooOld:
                log.warning("catalog.too-old", revision=self.revision)
                await self._refill()
            except Unavailable as error:
                log.warning("catalog.unavailable", error=str(error))
                await asyncio.sleep(error.retry_after)

    async def _refill(self) -> None:
        self.breaks += 1
        while True:
            try:
                await self._fill()
            except Unavailable as error:
                log.warning("catalog.unavailable", error=str(error))
                await asyncio.sleep(error.retry_after)
            else:
                return

    def _take(self, change: Change) -> None:
        kind, _, name = change.key.partition("/")
        table = self._tables.by_kind.get(kind)
        if table is None:
            return
        if change.value is None:
            table.pop(name, None)
            return
        try:
            record = _ADAPTERS[kind].validate_json(change.value)
        except ValidationError as error:
            # Written by a newer version, or damaged: left where it is, and treated as absent.
            log.error("catalog.unreadable", key_name=change.key, error=str(error))
            table.pop(name, None)
            return
        table[name] = Versioned(record, change.revision)

    def _tell(self, keys: Iterable[str]) -> None:
        changed = frozenset(keys)
        for listener in self._listeners:
            listener(changed)
