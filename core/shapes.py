"""The shapes of what engines run, as histograms of few sizes: counted in engines, faded by agents, merged by the
controller. Pure.

A step's size is its scheduled tokens, a request's is its prompt's tokens. Each is counted under the upper end of its
bucket: for steps the sizes that engines capture graphs of, and powers of two above; for prompts powers of two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from relight.core.records import Shapes

STEPS = (1, 2, 4, *range(8, 513, 8), *(1 << n for n in range(10, 21)))
PROMPTS = tuple(1 << n for n in range(21))
"""Upper ends; what is larger than the last one is counted with it."""
HALF_LIFE = 3600.0
"""Seconds after which what ran counts half."""
LEAST_PROMPTS = 16
"""So many requests must have run before their shapes are acted on: a handful says nothing of a fleet."""
MOST_STEPS, MOST_PROMPTS = 32, 8
"""How many sizes a start is told."""
OWN_REQUEST = "relight-own"
"""In the id of every request that an agent sends by itself: no traffic, and not counted."""
_NOTHING = 1e-3
"""A weight below this is left out: it is what many half-lives leave of one request."""


def bucket(ends: Sequence[int], size: int) -> int:
    """The index of the bucket that `size` is counted in."""
    return min(bisect_left(ends, size), len(ends) - 1)


def faded(shapes: Shapes, now: float) -> Shapes:
    """`shapes` as they count at `now`."""
    share = 0.5 ** (max(now - shapes.at, 0.0) / HALF_LIFE)
    return Shapes(max(now, shapes.at), _scaled(shapes.steps, share), _scaled(shapes.prompts, share))


def grown(known: Shapes | None, before: Shapes | None, counted: Shapes) -> Shapes:
    """`known` and what was counted since `before`. Both of these are an engine's own counts since its process began;
    one that counted less than before is another process, and all of it is new."""
    if before is not None and any(
        now.get(size, 0) < count
        for then, now in ((before.steps, counted.steps), (before.prompts, counted.prompts))
        for size, count in then.items()
    ):
        before = None
    steps, prompts = (before.steps, before.prompts) if before else ({}, {})
    new = Shapes(counted.at, _less(counted.steps, steps), _less(counted.prompts, prompts))
    return new if known is None else merged((known, new))


def merged(parts: Iterable[Shapes]) -> Shapes:
    """The sum of all, each as it counts when the newest was told; nothing of none."""
    found = tuple(parts)
    at = max((s.at for s in found), default=0.0)
    whole = [faded(s, at) for s in found]
    return Shapes(at, _summed(s.steps for s in whole), _summed(s.prompts for s in whole))


def prevailing(stored: Shapes | None, present: Shapes) -> Shapes:
    """A model's shapes: `present`, of the engines that are there, unless what is `stored` still outweighs it."""
    if stored is None or weight(faded(stored, present.at)) <= weight(present):
        return present
    return stored


def weight(shapes: Shapes) -> float:
    """How many requests they rest on."""
    return sum(shapes.prompts.values())


def told(shapes: Shapes | None) -> Shapes | None:
    """What a start is told: the most common sizes; None while too little ran."""
    if shapes is None or weight(shapes) < LEAST_PROMPTS:
        return None
    return Shapes(shapes.at, _most(shapes.steps, MOST_STEPS), _most(shapes.prompts, MOST_PROMPTS))


def prompts(shapes: Shapes | None, count: int) -> tuple[int, ...]:
    """Prompt lengths of `count` requests, in tokens: the most common first, and again from there when they are few."""
    common = list(_most(shapes.prompts, count)) if shapes else []
    return tuple(common[n % len(common)] for n in range(count)) if common else ()


def _most(weights: Mapping[int, float], count: int) -> dict[int, float]:
    """The heaviest, of equals the smaller; as they are written into an engine's environment."""
    ranked = sorted(weights.items(), key=lambda pair: (-pair[1], pair[0]))
    return {size: round(share, 3) for size, share in ranked[:count]}


def _scaled(weights: Mapping[int, float], share: float) -> dict[int, float]:
    return {size: found for size, w in weights.items() if (found := w * share) >= _NOTHING}


def _less(whole: Mapping[int, float], part: Mapping[int, float]) -> dict[int, float]:
    return {size: left for size, w in whole.items() if (left := w - part.get(size, 0.0)) > 0}


def _summed(all_of: Iterable[Mapping[int, float]]) -> dict[int, float]:
    total: dict[int, float] = {}
    for weights in all_of:
        for size, w in weights.items():
            total[size] = total.get(size, 0.0) + w
    return dict(sorted(total.items()))
