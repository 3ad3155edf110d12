"""In which order models take the devices that are free. Zero I/O: core only.

By priority, and nobody starves: who has waited for STARVED_SECONDS since anything of it was last placed goes before all
that have not, the longest first. Nothing that serves is ever taken down for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from relight.core.records import Desired, ModelView, Plan

STARVED_SECONDS = 600.0


def in_turn(views: Iterable[ModelView], now: float) -> list[str]:
    """The models' keys; the same views in any order give the same."""

    def turn(view: ModelView) -> tuple[bool, float, float, str]:
        since = math.inf if view.waits_since is None else view.waits_since
        starved = now - since >= STARVED_SECONDS
        return not starved, 0.0 if starved else -float(view.spec.priority), since, view.spec.key

    return [view.spec.key for view in sorted(views, key=turn)]


def waits(before: Mapping[str, float], made: Plan, now: float) -> dict[str, float]:
    """Since when each model waits for devices; whoever got one waits for the next from now on."""
    served = {p.model for p in made.placements if p.desired is Desired.READY}
    return {key: now if key in served else min(before.get(key, now), now) for key in made.waiting}
