"""Numbers that were wanted are held for a while after they no longer are. Zero I/O: a total function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from relight.core.records import HeldLevel


def hold(levels: Iterable[HeldLevel], wanted: int, now: float, seconds: float) -> tuple[HeldLevel, ...]:
    """The levels after a look that found `wanted` (0: nothing), the lowest first.

    A higher level counts as wanted while a higher one still does, so only what no higher one outlasts is kept.
    """
    kept = []
    for level in levels:
        if level.replicas <= wanted:
            continue
        # A wall clock that was put back must not prolong what was promised.
        left_at = level.left_at if level.left_at is not None and level.left_at <= now else now
        if not left_at + seconds <= now:
            kept.append(replace(level, left_at=left_at))
    if wanted > 0:
        kept.append(HeldLevel(wanted, None))
    found: list[HeldLevel] = []
    # Of one number the level that lasts longest comes first, and the others say nothing new.
    for level in sorted(kept, key=lambda k: (-k.replicas, k.left_at is not None, -(k.left_at or 0.0))):
        if not found or (level.replicas < found[-1].replicas and _outlasts(level, found[-1])):
            found.append(level)
    return tuple(reversed(found))


def highest(levels: Iterable[HeldLevel]) -> int:
    """The number that is held; 0 for none."""
    return max((level.replicas for level in levels), default=0)


def next_end(levels: Iterable[HeldLevel], seconds: float) -> float | None:
    """The wall time at which the next level is let go; None while only wanted ones are held."""
    return min((level.left_at + seconds for level in levels if level.left_at is not None), default=None)


def _outlasts(lower: HeldLevel, higher: HeldLevel) -> bool:
    return higher.left_at is not None and (lower.left_at is None or lower.left_at > higher.left_at)
