"""Who makes room for a model when every device that it could use has somebody awake on it.

What stands above a model's written number gives way: the replica that requests woke from zero, or a burst. It does so
for requests that wait, for a burst, and for a number that somebody wrote; what somebody wrote is never taken for
another. An idle one goes at once, the least recently used of the lowest priority first; one that is busy goes when the
other has waited for FAIR_SECONDS and it has served for as long, so that models that share a device take turns and none
starves. Zero I/O: core only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relight.controller.plan.devices import FreeDevices, places_of
from relight.controller.plan.fleet import ModelFleet, same_runtime
from relight.controller.plan.retire import settled_since
from relight.controller.plan.rollout import leaving
from relight.core.records import Decision, Desired, InstanceView, ModelSpec, ModelView, SlotView
from relight.core.states import State

FAIR_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    """Who goes for a model, and why; `waits` names those that are on their way out already, which is waited for."""

    goes: tuple[tuple[InstanceView, str], ...] = ()
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """What is looked at: all by model key, and slots by name."""

    views: Mapping[str, ModelView]
    fleet: Mapping[str, ModelFleet]
    decisions: Mapping[str, Decision]
    slots: Mapping[str, SlotView]
    free: FreeDevices
    now: float


def written(spec: ModelSpec) -> int:
    """The number that stays whoever else asks."""
    return min(max(0, spec.min_replicas, spec.replicas), max(0, spec.max_replicas))


@dataclass(frozen=True, slots=True)
class _Able:
    """A replica that may go, and how many of its model may."""

    view: ModelView
    instance: InstanceView
    why: str
    most: int


def way_for(asker: ModelView, scene: Scene) -> Way:
    """What makes room for one replica of `asker`; nothing while it has no claim, or nobody may go."""
    claim = _claim(asker, scene)
    if claim is None:
        return Way()
    others = (view for key, view in scene.views.items() if key != asker.spec.key)
    able = {a.instance.instance: a for view in others for a in _able(view, asker, claim, scene)}
    found = [way for way in _ways(asker, scene, able) if way is not None]
    patient = [way for way in found if not way.goes]
    return patient[0] if patient else min(found, key=lambda way: _worth(way, able), default=Way())


def promised(view: ModelView, instance: InstanceView, scene: Scene) -> str:
    """The model that `instance` gives way to, so that it is not wanted back although requests of its own wait by now;
    empty for none."""
    own = _finite(view.demand.oldest_held_seconds) if view.demand else 0.0
    for key, other in sorted(scene.views.items()):
        claim = _claim(other, scene) if key != view.spec.key else None
        if claim is None or claim.waited <= own or other.spec.priority < view.spec.priority:
            continue
        if any(set(places_of(g)) & set(places_of(instance)) for g in scene.fleet[key].guardians):
            return key
    return ""


@dataclass(frozen=True, slots=True)
class _Claim:
    """Why a model may ask others to go, and since how many seconds it has."""

    why: str
    waited: float


def _claim(view: ModelView, scene: Scene) -> _Claim | None:
    """None while nothing is missing, or only what was woken by requests that are gone."""
    key, decision = view.spec.key, scene.decisions.get(view.spec.key)
    there = len(scene.fleet[key].wanted)
    if decision is None or there >= decision.replicas:
        return None
    waited = 0.0 if view.waits_since is None else max(0.0, _finite(scene.now - view.waits_since))
    if view.demand is not None and view.demand.held > 0:
        return _Claim(f"{key} has {view.demand.held} requests waiting", _finite(view.demand.oldest_held_seconds))
    if there < written(view.spec):
        return _Claim(f"{key} lacks a replica that somebody wrote", waited)
    return _Claim(f"{key} has more requests than its replicas are for", waited) if decision.burst else None


def _ways(asker: ModelView, scene: Scene, able: Mapping[str, _Able]) -> list[Way | None]:
    """One for each guardian that could wake, and one for a fresh start where there is none."""
    spec = asker.spec
    guardians = [
        g
        for g in scene.fleet[spec.key].guardians
        if g.state is State.DORMANT and same_runtime(spec, g.spec) and not leaving(spec, g, scene.slots)
    ]
    if guardians:
        return [_way([t.instance for t in scene.free.awake_beside(g)], scene, able) for g in guardians]
    chosen, _ = scene.free.find(spec, (), but_for=able.keys())
    there = {(slot, device.id) for slot, devices in chosen for device in devices}
    return [_way([n for n, a in able.items() if there & set(places_of(a.instance))], scene, able)] if chosen else []


def _way(others: Iterable[str], scene: Scene, able: Mapping[str, _Able]) -> Way | None:
    """How `others` come to sleep; None when one of them stays."""
    going = {
        i.instance
        for lists in scene.fleet.values()
        for i in (*lists.draining, *lists.leaving, *lists.guardians)
        if i.desired is not Desired.READY
    }
    goes, waits = [], []
    left = {a.view.spec.key: a.most for a in able.values()}
    for name in others:
        if name in going:
            waits.append(name)
        elif name in able and left[able[name].view.spec.key] > 0:
            left[able[name].view.spec.key] -= 1
            goes.append((able[name].instance, able[name].why))
        else:
            return None
    return Way(tuple(goes), tuple(waits)) if goes or waits else None


def _able(view: ModelView, asker: ModelView, claim: _Claim, scene: Scene) -> list[_Able]:
    """The replicas of `view` that may go for `asker`."""
    decision = scene.decisions.get(view.spec.key)
    lists = scene.fleet[view.spec.key]
    above = min(len(lists.wanted), decision.replicas if decision else 0) - written(view.spec)
    if above <= 0 or view.demand is None:
        return []
    found = []
    for instance in lists.wanted:
        if instance.state is not State.READY:
            continue
        if not view.demand.held and not view.demand.in_flight and not instance.in_flight:
            found.append(_Able(view, instance, f"{claim.why}, and it has none", above))
        elif (
            view.spec.priority <= asker.spec.priority
            and claim.waited >= FAIR_SECONDS
            and scene.now - settled_since(instance) >= FAIR_SECONDS
        ):
            told = f"{claim.why} for {FAIR_SECONDS:g} s, and it has served for as long"
            found.append(_Able(view, instance, told, above))
    return found


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


def _worth(way: Way, able: Mapping[str, _Able]) -> tuple[int, int, float, str]:
    views = [able[i.instance].view for i, _ in way.goes]
    busy = sum(i.in_flight for i, _ in way.goes)
    last = max(_finite(v.demand.last_request_at or 0.0) if v.demand else 0.0 for v in views)
    return busy, max(v.spec.priority for v in views), last, way.goes[0][0].instance
