"""Replacing replicas that serve but no longer fit: an earlier specification, or a closing slot. Zero I/O: core only.

Order of a replacement: the new one is placed, proven and ready, then an old one drains; never the other way round,
unless `max_unavailable` allows it and there is no room. The first replica of another specification goes alone: until
it is proven, no second one is placed and nobody old leaves. Slots that close have no such patience: all replacements
start at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relight.controller.plan.fleet import ModelFleet, closed_to, first_difference
from relight.core.records import Decision, InstanceView, ModelSpec, ModelView, SlotView
from relight.core.states import State


def unfit(spec: ModelSpec, instance: InstanceView, slots: Mapping[str, SlotView]) -> str:
    """Why `instance` must be replaced; empty while it serves what `spec` asks for, where it may."""
    moved = leaving(spec, instance, slots)
    if moved:
        return moved
    for name in ("uri", "revision", "served_names"):
        here, there = getattr(spec, name), getattr(instance.spec, name)
        if here != there:
            return f"{name}: {here!r} is asked for, {there!r} there"
    return first_difference(spec, instance.spec)


def leaving(spec: ModelSpec, instance: InstanceView, slots: Mapping[str, SlotView]) -> str:
    """Why `instance` cannot stay where it is, dormant or awake; empty when it can."""
    for member in instance.members:
        slot = slots.get(member.slot)
        why = closed_to(spec, slot) if slot is not None and slot.alive else ""
        if why:
            return f"slot {member.slot} is {why}"
    return ""


def set_stale_apart(view: ModelView, lists: ModelFleet, slots: Mapping[str, SlotView]) -> None:
    """Moves what must be replaced from `wanted` to `stale`."""
    for instance in list(lists.wanted):
        paused = view.spec.strategy.paused and not leaving(view.spec, instance, slots)
        if not paused and unfit(view.spec, instance, slots):
            lists.wanted.remove(instance)
            lists.stale.append(instance)


@dataclass(frozen=True, slots=True)
class Step:
    """What a rollout does next: how many may be placed now, and which old ones leave, each with its reason."""

    place: int
    retire: tuple[tuple[InstanceView, str], ...]


def next_step(view: ModelView, lists: ModelFleet, slots: Mapping[str, SlotView], decision: Decision) -> Step:
    """The next step while there are stale replicas; `lists.wanted` are those that fit."""
    spec, target = view.spec, decision.replicas
    closing = [i for i in lists.stale if leaving(spec, i, slots)]
    outdated = [i for i in lists.stale if i not in closing]
    proven = sum(i.state is State.READY for i in lists.wanted)
    coming = len(lists.wanted) - proven
    missing = max(0, target - len(lists.wanted))
    # A closing one is not counted: its replacement must not wait for the room that it will leave.
    place = min(missing, max(0, target + spec.strategy.max_surge - len(lists.wanted) - len(outdated)))
    if outdated and not proven:
        # The canary.
        place = min(place, max(0, 1 - coming))
    serving = [i for i in (*closing, *outdated) if i.state is State.READY]
    idle = [i for i in lists.stale if i.state is not State.READY]
    surplus = max(0, proven + len(serving) - target)
    # The surplus may come from the fresh ones alone, which another step takes away.
    surplus = min(surplus, len(serving))
    leaves = sorted(serving, key=lambda i: (i not in closing, i.in_flight, i.instance))[:surplus]
    told = {i.instance: unfit(spec, i, slots) for i in lists.stale}
    retire = [(i, f"never served, and no longer fits: {told[i.instance]}") for i in idle]
    retire += [(i, f"its replacement serves ({told[i.instance]})") for i in leaves]
    return Step(place, tuple(retire))


def make_room(view: ModelView, lists: ModelFleet, decision: Decision) -> InstanceView | None:
    """The old replica that leaves although nothing replaces it yet; None when that would leave too few.

    Asked when the strategy allows no surge, or nothing could be placed.
    """
    serving = [i for i in lists.stale if i.state is State.READY]
    proven = sum(i.state is State.READY for i in lists.wanted)
    # While one is on its way the room for it has been made; and what drains already makes some.
    if not serving or len(lists.wanted) > proven or lists.draining:
        return None
    if proven + len(serving) - 1 < decision.replicas - view.spec.strategy.max_unavailable:
        return None
    return min(serving, key=lambda i: (i.in_flight, i.instance))
