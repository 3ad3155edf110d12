"""What the engines of each model run: merged out of their reports, and what is kept of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from relight.core.records import Shapes, Snapshot
from relight.core.shapes import merged, prevailing, weight

STORED_SECONDS = 60.0
"""Between two writes for one model, unless much more is known: what a controller or an engine takes with it is less."""
MUCH = 1.25
"""Times as many requests as what is stored rests on."""


def present(snapshot: Snapshot, model: str, stored: Shapes | None) -> Shapes | None:
    """What is known of a model's requests now: of its engines, or of those that were; None while nobody told."""
    reports = [
        member.report.shapes
        for view in snapshot.instances
        if view.model == model
        # All ranks of an engine run the same steps.
        for member in view.members[:1]
        if member.report is not None and member.report.shapes is not None
    ]
    return prevailing(stored, merged(reports)) if reports else stored


def worth_storing(snapshot: Snapshot, stored: Mapping[str, Shapes]) -> dict[str, Shapes]:
    """Of each model what should be written down now."""
    found = {}
    for view in snapshot.models:
        known = stored.get(view.spec.key)
        now = present(snapshot, view.spec.key, known)
        if now is None or now == known:
            continue
        if known is None or now.at - known.at >= STORED_SECONDS or weight(now) >= MUCH * weight(known):
            found[view.spec.key] = now
    return found
