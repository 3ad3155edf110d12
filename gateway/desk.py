"""The front desk: which request goes where and when. Holds while nothing is ready, paces the release, counts.

Everything happens on one event loop, so a decision is never interrupted. The first held request is released
within the call that brought the table; the rest follow at the configured rate.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from relight.core.clock import Clock
from relight.core.errors import Unavailable
from relight.core.records import (
    GatewayInstance,
    GatewayModel,
    GatewayReport,
    GatewaySpan,
    RouteModel,
    RouteReplica,
    RouteTable,
)
from relight.gateway.table import Key, Names, choose, key_of

SPANS = 64
"""Newest spans that every report repeats, so that a restarted controller still hears of them."""
NEXT = "next"
"""The pin that waits for whichever replica becomes ready next."""


class QueueFull(Unavailable):
    """The hold queue has no place left."""

    code = "queue-full"


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests may be held at once, how long each (seconds), and how many a second are released."""

    held: int = 1024
    hold_seconds: float = 120.0
    release_per_second: float = 50.0


@dataclass(slots=True, eq=False)
class Held:
    """One waiting request. `known` are the replicas that were ready when it came (for the pin `next`)."""

    since: float
    future: asyncio.Future[RouteReplica]
    pin: str
    known: frozenset[Key]
    avoid: set[Key]

    def takes(self, replica: RouteReplica) -> bool:
        """Whether it may go to this replica."""
        key = key_of(replica)
        if key in self.avoid:
            return False
        if self.pin == NEXT:
            return key not in self.known
        return self.pin in ("", replica.instance)


@dataclass(slots=True)
class _Model:
    queue: deque[Held] = field(default_factory=deque)
    in_flight: int = 0
    last_request_at: float = 0.0
    releasing: asyncio.Task[None] | None = None


class Desk:
    """`changed(urgent)` is called when the report would differ; urgent changes must not wait to be told."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock: Clock,
        changed: Callable[[bool], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._name, self._limits, self._clock = name, limits, clock
        self._changed, self._sleep = changed, sleep
        self._table: RouteTable | None = None
        self.names = Names({})
        self._models: dict[str, _Model] = {}
        self._in_flight: dict[Key, int] = {}
        self._ready_at: dict[Key, float] = {}
        self._spans: deque[GatewaySpan] = deque(maxlen=SPANS)
        self._begun: set[Key] = set()
        self._held, self._turn = 0, 0
        self._closing = False

    @property
    def synced(self) -> bool:
        """Whether routes were ever told."""
        return self._table is not None

    # ------------------------------------------------------------------ routes

    def update(self, table: RouteTable) -> None:
        """Routes by `table` from now on; held requests that can go are released, hopeless ones refused."""
        now = self._clock.now()
        fresh: dict[Key, float] = {}
        for model in table.models:
            for replica in model.replicas:
                fresh[key_of(replica)] = self._ready_at.get(key_of(replica), now)
        # What was ready before this gateway came has had its first request elsewhere.
        self._begun = set(fresh) if self._table is None else self._begun & set(fresh)
        self._table, self._ready_at = table, fresh
        self.names = Names.of(table)
        known = {f"{m.namespace}/{m.name}": m for m in table.models}
        for name, state in list(self._models.items()):
            now_is = known.get(name)
            if now_is is not None:
                self._release(name, state, now_is)
            if now_is is None or not _hope(now_is):
                reason = now_is.reason if now_is else "the model was removed"
                for held in [h for h in state.queue if not h.future.done()]:
                    held.future.set_exception(_nothing_comes(reason))
            if now_is is None and not state.queue and not state.in_flight:
                del self._models[name]
        self._changed(True)

    def _model(self, name: str) -> RouteModel | None:
        models = self.names.by_name.get(name, ())
        return models[0] if models else None

    # ------------------------------------------------------------------ one request

    async def admit(self, name: str, pin: str, avoid: set[Key], since: float) -> RouteReplica:
        """The replica for one request of the model `name` (namespace/name), counted in flight until `done`.

        `since` (monotonic) is when the request came: the hold time counts from there, over all its tries.
        Raises QueueFull, or Unavailable when nothing can come or came in time.
        """
        state = self._models.setdefault(name, _Model())
        state.last_request_at = self._clock.now()
        model = self._model(name)
        if model is None or self._closing:
            raise Unavailable("the gateway is shutting down" if self._closing else "the model was removed")
        if not state.queue and not pin:
            replica = choose(model.replicas, self._in_flight, avoid, self._turn)
            if replica is not None:
                self._take(state, replica)
                return replica
        held = Held(since, asyncio.get_running_loop().create_future(), pin, frozenset(self._ready_at), avoid)
        direct = next((r for r in model.replicas if pin not in ("", NEXT) and held.takes(r)), None)
        if direct is not None:
            self._take(state, direct)
            return direct
        if not _hope(model) and pin in ("", NEXT):
            raise _nothing_comes(model.reason, model.next_ready_seconds)
        if self._held >= self._limits.held:
            raise QueueFull(f"{self._held} requests are held already", retry_after=model.next_ready_seconds or 1.0)
        return await self._hold(name, state, held, model)

    async def _hold(self, name: str, state: _Model, held: Held, model: RouteModel) -> RouteReplica:
        state.queue.append(held)
        self._held += 1
        self._changed(True)
        waited = self._clock.monotonic() - held.since
        try:
            # Replicas may be ready and others be queued before this one: then the pace is already set.
            self._release(name, state, model)
            async with asyncio.timeout(max(self._limits.hold_seconds - waited, 0.0)):
                return await held.future
        except TimeoutError:
            if _granted(held):
                # Both at the same moment: the replica is taken already.
                return held.future.result()
            raise Unavailable(
                f"no replica became ready within {self._limits.hold_seconds:g} s",
                retry_after=model.next_ready_seconds or 5.0,
            ) from None
        except asyncio.CancelledError:
            if _granted(held):
                self.done(name, held.future.result())
            raise
        finally:
            self._held -= 1
            if held in state.queue:
                state.queue.remove(held)
            self._changed(True)

    def has_other(self, name: str, avoid: set[Key], replica: RouteReplica) -> bool:
        """Whether a request that `replica` failed may go to another one that is ready now."""
        model = self._model(name)
        tried = avoid | {key_of(replica)}
        return model is not None and any(key_of(r) not in tried for r in model.replicas)

    def done(self, name: str, replica: RouteReplica) -> None:
        """The request on `replica` ended, however it ended."""
        key = key_of(replica)
        left = self._in_flight.get(key, 0) - 1
        if left > 0:
            self._in_flight[key] = left
        else:
            self._in_flight.pop(key, None)
        state = self._models.get(name)
        if state is not None:
            state.in_flight -= 1
        # A drained replica is being waited for: its last request is news.
        self._changed(left <= 0 and key not in self._ready_at)

    def _take(self, state: _Model, replica: RouteReplica) -> None:
        key = key_of(replica)
        self._turn += 1
        self._in_flight[key] = self._in_flight.get(key, 0) + 1
        state.in_flight += 1
        self._changed(False)

    # ------------------------------------------------------------------ releasing

    def _release(self, name: str, state: _Model, model: RouteModel) -> None:
        for held in [h for h in state.queue if h.pin]:
            self._go(state, held, model)
        if state.releasing is None and self._release_one(state, model) and state.queue:
            state.releasing = asyncio.create_task(self._pace(name, state), name=f"release:{name}")

    def _release_one(self, state: _Model, model: RouteModel) -> bool:
        return any(self._go(state, h, model) for h in list(state.queue) if not h.pin)

    def _go(self, state: _Model, held: Held, model: RouteModel) -> bool:
        able = [r for r in model.replicas if held.takes(r)]
        replica = choose(able, self._in_flight, held.avoid, self._turn)
        if replica is None or held.future.done():
            return False
        state.queue.remove(held)
        self._take(state, replica)
        held.future.set_result(replica)
        return True

    async def _pace(self, name: str, state: _Model) -> None:
        try:
            while state.queue:
                await self._sleep(1.0 / self._limits.release_per_second)
                model = self._model(name)
                if model is None or not self._release_one(state, model):
                    return
        finally:
            state.releasing = None

    # ------------------------------------------------------------------ what is told

    def first_of(self, replica: RouteReplica, sent_at: float) -> bool:
        """Notes the `route` span; True when this is the first request of the replica's incarnation."""
        key = key_of(replica)
        if key in self._begun or key not in self._ready_at:
            return False
        self._begun.add(key)
        self._spans.append(GatewaySpan(*key, "route", self._ready_at[key], sent_at))
        return True

    def first_token(self, replica: RouteReplica, sent_at: float) -> None:
        """Notes the `first_token` span of a first request."""
        self._spans.append(GatewaySpan(*key_of(replica), "first_token", sent_at, self._clock.now()))
        self._changed(True)

    def held_by_model(self) -> Iterator[tuple[str, int, int, float]]:
        """(model, held, in flight, seconds that the oldest one waits) of every model that was asked for."""
        now = self._clock.monotonic()
        for name, state in self._models.items():
            yield name, len(state.queue), state.in_flight, _oldest(state, now)

    def report(self) -> GatewayReport:
        """All of it, as of now."""
        now = self._clock.monotonic()
        models = []
        for name, state in self._models.items():
            namespace, _, bare = name.partition("/")
            models.append(
                GatewayModel(
                    namespace, bare, len(state.queue), _oldest(state, now), state.in_flight, state.last_request_at
                )
            )  # fmt: skip
        return GatewayReport(
            gateway=self._name,
            route_revision=self._table.revision if self._table else 0,
            models=tuple(models),
            instances=tuple(GatewayInstance(*key, count) for key, count in self._in_flight.items()),
            spans=tuple(self._spans),
        )

    def close(self) -> None:
        """Refuses what is held and what comes; what is in flight goes on."""
        self._closing = True
        for state in self._models.values():
            for held in [h for h in state.queue if not h.future.done()]:
                held.future.set_exception(Unavailable("the gateway is shutting down"))


def _oldest(state: _Model, now: float) -> float:
    return max((now - held.since for held in state.queue), default=0.0)


def _granted(held: Held) -> bool:
    future = held.future
    return future.done() and not future.cancelled() and future.exception() is None


def _hope(model: RouteModel) -> bool:
    return bool(model.replicas) or model.coming > 0 or model.can_come


def _nothing_comes(reason: str, seconds: float | None = None) -> Unavailable:
    return Unavailable(f"no replica can come: {reason or 'no reason given'}", retry_after=seconds or 5.0)
