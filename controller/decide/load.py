"""What load asks for: requests at once, and how many replicas are for so many. Zero I/O: a total function."""

from __future__ import annotations

import math

from relight.core.records import Demand, ModelSpec


def load(demand: Demand | None) -> int | None:
    """Requests held and in flight. None where nobody knows, as also where what is told is no count: never zero."""
    if demand is None:
        return None
    counts = (demand.held, demand.in_flight)
    if not all(math.isfinite(c) and c >= 0 for c in counts):
        return None
    return int(sum(counts))


def replicas_for(requests: int, spec: ModelSpec) -> int:
    """How many replicas so many requests are for, whatever the model's bounds."""
    return -(-requests // max(1, spec.scaling.requests_per_replica))


def target(demand: Demand | None, spec: ModelSpec) -> int | None:
    """How many replicas load asks for within the model's bounds; None where the load is not known."""
    requests = load(demand)
    if requests is None:
        return None
    # The maximum wins over a minimum above it: it is what an owner pays for.
    return min(max(0, spec.min_replicas, replicas_for(requests, spec)), max(0, spec.max_replicas))
