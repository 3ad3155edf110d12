"""A snapshot seen by the planner: instances by what they are for, and which slots are open to them. Zero I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.core.fingerprint import digest
from relight.core.records import Desired, InstanceView, ModelSpec, SlotView, Snapshot
from relight.core.states import State

_RUNTIME = ("engine", "args", "members", "devices_per_member", "expert_parallel", "adapters")
_LEVEL_AT_START = frozenset({"sglang"})
"""Engines that are told when they start whether they keep a copy of their weights while they sleep."""
MIN_RETRY_SECONDS = 1.0
"""The least time between a failure and its replacement, so that a bad spec cannot spin."""


def retry_at(instance: InstanceView) -> float | None:
    """When a failed instance may be replaced, in wall seconds; None when never by itself."""
    if instance.failure is None or instance.failure.retry_after is None:
        return None
    return instance.failed_at + max(instance.failure.retry_after, MIN_RETRY_SECONDS)


def due(instance: InstanceView, now: float) -> bool:
    """Whether a failure no longer holds its replacement back."""
    at = retry_at(instance)
    return at is not None and at <= now


def _started_with(spec: ModelSpec) -> Mapping[str, object]:
    """What a process was started with, but for the environment."""
    level = {"guardians.level": spec.guardians.level} if spec.engine in _LEVEL_AT_START else {}
    return {**{name: getattr(spec, name) for name in _RUNTIME}, **level}


def first_difference(ours: ModelSpec, theirs: ModelSpec) -> str:
    """The first field in which processes started for these two would differ; empty when none does.

    Content and numbers do not count. Values of the environment are not told: they may be secret.
    """
    here, there = _started_with(ours), _started_with(theirs)
    for name in here:
        if here[name] != there.get(name):
            return f"{name}: {here[name]!r} here, {there.get(name)!r} there"
    if dict(ours.env) != dict(theirs.env):
        names = sorted(k for k in {*ours.env, *theirs.env} if ours.env.get(k) != theirs.env.get(k))
        return f"env: {', '.join(names)} differ"
    return ""


def runtime_digest(spec: ModelSpec) -> str:
    """Names all that `first_difference` compares, without telling it."""
    fields = {name: repr(value) for name, value in _started_with(spec).items()}
    return digest({**fields, "env": repr(sorted(spec.env.items()))})


def same_runtime(ours: ModelSpec, theirs: ModelSpec) -> bool:
    """Whether a process started for `theirs` can serve `ours`: all but content and numbers is equal."""
    return not first_difference(ours, theirs)


@dataclass(slots=True)
class ModelFleet:
    """The instances of one model, each in exactly one list, in the order of their ids."""

    wanted: list[InstanceView] = field(default_factory=list)
    """Desired ready, not failed, on slots that are alive: these count as replicas."""
    stale: list[InstanceView] = field(default_factory=list)
    """As wanted, but to be replaced (controller/plan/rollout.py says why): they serve until others do."""
    draining: list[InstanceView] = field(default_factory=list)
    guardians: list[InstanceView] = field(default_factory=list)
    failed: list[InstanceView] = field(default_factory=list)
    """Failed just now: to be given up."""
    remembered: list[InstanceView] = field(default_factory=list)
    lost: list[InstanceView] = field(default_factory=list)
    """On a slot that is not alive: they count as nothing and are left as they are until it returns."""
    leaving: list[InstanceView] = field(default_factory=list)


def sort_fleet(snapshot: Snapshot) -> dict[str, ModelFleet]:
    """Every instance of the snapshot by model; a model of the snapshot without instances is there too."""
    alive = {slot.slot for slot in snapshot.slots if slot.alive}
    fleet = {view.spec.key: ModelFleet() for view in snapshot.models}
    for instance in sorted(snapshot.instances, key=lambda i: i.instance):
        lists = fleet.setdefault(instance.model, ModelFleet())
        _list_of(lists, instance, alive).append(instance)
    return fleet


def _list_of(lists: ModelFleet, instance: InstanceView, alive: set[str]) -> list[InstanceView]:
    if instance.remembered:
        return lists.remembered
    if instance.desired is Desired.GONE:
        return lists.leaving
    if any(member.slot not in alive for member in instance.members):
        return lists.lost
    if instance.state is State.FAILED or (instance.failure is not None and instance.desired is Desired.READY):
        return lists.failed
    # Its process ended although it was wanted: as good as failed, and its claim must not stay.
    if instance.state in (State.STOPPING, State.GONE):
        return lists.failed
    if instance.desired is Desired.DRAINED:
        return lists.draining
    return lists.wanted if instance.desired is Desired.READY else lists.guardians


def closed_to(spec: ModelSpec, slot: SlotView) -> str:
    """Why nothing new of `spec` may go to `slot`, whatever is free there; empty when it may."""
    if slot.closing:
        return f"closing ({slot.closing})"
    if slot.pool != spec.pool:
        return f"of pool {slot.pool}" if slot.pool else "of no pool"
    if slot.allowed and spec.key not in slot.allowed:
        return "of a pool that does not allow it"
    return ""
