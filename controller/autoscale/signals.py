"""What autoscalers are told of each model, whichever way they ask. What nobody knows is None, and never 0."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from relight.controller.decide.load import load, target
from relight.core.records import Demand, Desired, ModelSpec, Plan, Snapshot
from relight.core.states import State


class Metric(StrEnum):
    """The signals, by the names that stand in metrics behind `relight_`."""

    DEMAND = "demand"
    """Requests held and in flight."""
    HELD = "held_requests"
    IN_FLIGHT = "in_flight_requests"
    TARGET = "target_replicas"
    """How many replicas the load asks for, within the model's bounds."""
    CURRENT = "current_replicas"
    """Awake or on their way."""
    READY = "ready_replicas"
    RATIO = "target_ratio"
    """Target replicas for each that is ready: what the number is to be multiplied by."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Replicas that are wanted awake, and those of them that are."""

    current: int
    ready: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One model's signals. `counts` is None until every slot was heard of."""

    spec: ModelSpec
    demand: Demand | None
    counts: Counts | None

    def value(self, metric: Metric) -> float | None:
        """The signal; None where it cannot be known now."""
        requests, wanted = load(self.demand), target(self.demand, self.spec)
        if metric is Metric.CURRENT:
            return self.counts.current if self.counts else None
        if metric is Metric.READY:
            return self.counts.ready if self.counts else None
        if self.demand is None or requests is None or wanted is None:
            return None
        if metric is Metric.RATIO:
            return wanted / max(1, self.counts.ready) if self.counts else None
        known = {
            Metric.DEMAND: requests,
            Metric.HELD: self.demand.held,
            Metric.IN_FLIGHT: self.demand.in_flight,
            Metric.TARGET: wanted,
        }
        return known[metric]


def count_replicas(snapshot: Snapshot) -> Mapping[str, Counts]:
    """By model; one without replicas counts nothing. Empty until every slot was heard of."""
    if not snapshot.synced:
        return {}
    wanted = [i for i in snapshot.instances if i.desired is Desired.READY and not i.remembered]
    current = Counter(i.model for i in wanted)
    ready = Counter(i.model for i in wanted if i.state is State.READY and i.failure is None)
    return {v.spec.key: Counts(current[v.spec.key], ready[v.spec.key]) for v in snapshot.models}


class Board:
    """The newest signals: replicas as of the last look of the loop, demand as of now."""

    def __init__(self, demand: Callable[[str], Demand | None]) -> None:
        self._demand = demand
        self._specs: dict[str, ModelSpec] = {}
        self._counts: Mapping[str, Counts] = {}
        self._waiting: set[asyncio.Event] = set()

    def passed(self, snapshot: Snapshot, _: Plan) -> None:
        """Takes a look of the loop in and wakes who waits for one."""
        self._specs = {v.spec.key: v.spec for v in snapshot.models}
        self._counts = count_replicas(snapshot)
        for event in self._waiting:
            event.set()

    def reading(self, model: str) -> Reading | None:
        """Of a model by its key; None when there is none."""
        spec = self._specs.get(model)
        return Reading(spec, self._demand(model), self._counts.get(model)) if spec else None

    def readings(self, namespace: str) -> list[Reading]:
        """Of all models of a namespace, by their names."""
        keys = sorted(key for key, spec in self._specs.items() if spec.namespace == namespace)
        return [found for key in keys if (found := self.reading(key)) is not None]

    @contextmanager
    def looks(self) -> Iterator[asyncio.Event]:
        """An event that each look of the loop sets; whoever waits clears it."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)
