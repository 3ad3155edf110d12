"""The built-in autoscaler at work: looks at its models whenever something changed, writes numbers, remembers why."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from relight.controller.accept import Accept
from relight.controller.autoscale.rules import Action, Look, Memory, Verdict, judge
from relight.controller.decide.replicas import idle
from relight.controller.loop import Reconciler
from relight.controller.state.catalog import Catalog
from relight.core.clock import Clock
from relight.core.errors import Fenced, RelightError
from relight.core.logs import get_logger
from relight.core.records import Desired, ModelView, Plan, ScaleRequest, Snapshot
from relight.core.states import State

WRITER = "relight-autoscaler"
KEPT = 100
"""Entries of each model's log."""
RETRY_SECONDS = 1.0

log = get_logger("controller.autoscale")


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision: what was seen, what came of it, and why. `error` says why a number could not be written."""

    at: float
    held: int | None
    in_flight: int | None
    ready: int
    coming: int
    overdue: int
    written: int
    target: int | None
    number: int
    action: Action
    reason: str
    error: str = ""


class Autoscaler:
    """Looks whenever the loop has looked, and when time alone may change something. `run` until cancelled."""

    def __init__(self, reconciler: Reconciler, catalog: Catalog, accept: Accept, clock: Clock) -> None:
        self._reconciler, self._catalog, self._accept, self._clock = reconciler, catalog, accept, clock
        self._wanted = asyncio.Event()
        self._memories: dict[str, Memory] = {}
        self._logs: dict[str, deque[Entry]] = {}

    def passed(self, snapshot: Snapshot, _: Plan) -> None:
        """The loop has looked."""
        if self._logs or any(view.spec.autoscaler.enabled for view in snapshot.models):
            self._wanted.set()

    @property
    def logs(self) -> Mapping[str, deque[Entry]]:
        """The last decisions of each model, by its key, the newest last."""
        return self._logs

    async def run(self) -> None:
        """Looks and writes until cancelled. Raises Fenced when another controller acts."""
        timeout: float | None = None
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), timeout)
            self._wanted.clear()
            timeout = await self._look()

    async def _look(self) -> float | None:
        """Returns after how many seconds to look again by itself."""
        snapshot = self._reconciler.snapshot()
        views = {v.spec.key: v for v in snapshot.models if v.spec.autoscaler.enabled}
        for table in (self._memories, self._logs):
            for key in [k for k in table if k not in views]:
                del table[key]
        times: list[float] = []
        for key, view in views.items():
            look = self._seen(view, snapshot)
            verdict = judge(view.spec, look, self._memories.get(key, Memory()))
            self._memories[key] = verdict.memory
            error = ""
            if verdict.number != view.spec.replicas:
                error = await self._write(key, verdict)
                if error:
                    times.append(RETRY_SECONDS)
            self._note(view, look, verdict, error)
            if verdict.look_again_at is not None:
                # A little later than asked for, as the loop does.
                times.append(max(0.0, verdict.look_again_at - snapshot.now) + 0.001)
        return min(times, default=None)

    def _seen(self, view: ModelView, snapshot: Snapshot) -> Look:
        own = [
            i
            for i in snapshot.instances
            if i.model == view.spec.key and i.desired is Desired.READY and i.failure is None and not i.remembered
        ]
        coming = [self._ready_in(i.instance) for i in own if i.state is not State.READY]
        return Look(
            now=snapshot.now,
            demand=view.demand,
            ready=sum(i.state is State.READY for i in own),
            coming=tuple(coming),
            idle=view.demand is not None and idle(view, view.demand, snapshot.now),
            synced=snapshot.synced,
        )

    def _ready_in(self, instance: str) -> float | None:
        stored = self._catalog.expected.get(instance)
        return None if stored is None else stored.record.placed_at + stored.record.seconds - self._clock.now()

    async def _write(self, model: str, verdict: Verdict) -> str:
        request = ScaleRequest(model, verdict.number, WRITER, self._clock.now())
        try:
            await self._accept.scale(request)
        except Fenced:
            raise
        except RelightError as error:
            log.warning("autoscaler.not-written", model=model, number=verdict.number, error=str(error))
            return str(error)
        log.info("autoscaler.wrote", model=model, number=verdict.number, reason=verdict.reason)
        return ""

    def _note(self, view: ModelView, look: Look, verdict: Verdict, error: str) -> None:
        entry = Entry(
            at=look.now,
            held=view.demand.held if view.demand else None,
            in_flight=view.demand.in_flight if view.demand else None,
            ready=look.ready,
            coming=len(look.coming),
            overdue=look.overdue,
            written=view.spec.replicas,
            target=verdict.target,
            number=verdict.number,
            action=verdict.action,
            reason=verdict.reason,
            error=error,
        )
        found = self._logs.setdefault(view.spec.key, deque(maxlen=KEPT))
        if not found or _told(found[-1]) != _told(entry):
            found.append(entry)


def _told(entry: Entry) -> tuple[object, ...]:
    """What makes an entry worth one: another number, or another ground for the same."""
    return entry.target, entry.number, entry.action, entry.error
