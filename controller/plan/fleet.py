"""A snapshot seen by the planner: instances by what they are for, and devices that are free. Zero I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from relight.core.fingerprint import digest
from relight.core.records import Desired, DeviceReport, InstanceView, ModelSpec, SlotView, Snapshot, Spread
from relight.core.states import State

_RUNTIME = ("engine", "args", "members", "devices_per_member", "expert_parallel", "adapters")
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


def first_difference(ours: ModelSpec, theirs: ModelSpec) -> str:
    """The first field in which processes started for these two would differ; empty when none does.

    Content and numbers do not count. Values of the environment are not told: they may be secret.
    """
    for name in _RUNTIME:
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            return f"{name}: {here!r} here, {there!r} there"
    if dict(ours.env) != dict(theirs.env):
        names = sorted(k for k in {*ours.env, *theirs.env} if ours.env.get(k) != theirs.env.get(k))
        return f"env: {', '.join(names)} differ"
    return ""


def runtime_digest(spec: ModelSpec) -> str:
    """Names all that `first_difference` compares, without telling it."""
    fields = {name: repr(getattr(spec, name)) for name in _RUNTIME}
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


class FreeDevices:
    """The devices that nobody claims, per slot; taking some makes them unavailable for the rest of a plan."""

    def __init__(self, snapshot: Snapshot) -> None:
        claimed = {
            (member.slot, device)
            for instance in snapshot.instances
            if not instance.remembered
            for member in instance.members
            for device in member.devices
        }
        known = {i.instance for i in snapshot.instances}
        self._slots: dict[str, SlotView] = {s.slot: s for s in snapshot.slots if s.alive}
        self._free: dict[str, list[DeviceReport]] = {
            name: [
                device
                for device in sorted(slot.devices, key=lambda d: d.id)
                if device.healthy
                and (name, device.id) not in claimed
                and all(holder.instance in known for holder in device.holders)
            ]
            for name, slot in sorted(self._slots.items())
        }

    def find(
        self, spec: ModelSpec, crowd: Iterable[str], around: Iterable[str] = ()
    ) -> tuple[list[tuple[str, tuple[DeviceReport, ...]]], str]:
        """A slot and its devices for every member of one instance of `spec`, or nothing and the reason.

        Every member has a slot of its own: an agent knows an instance by its id alone.
        `crowd` names the slots of the model's other instances, once each: emptier slots are preferred. `around` names
        those from whose hosts this one shall keep away, where the model asks for that.
        """
        hosts = Counter(self._host(slot) for slot in around if spec.guardians.spread is not Spread.NONE)
        apart = spec.guardians.spread is Spread.REQUIRED
        load: dict[str, int] = {}
        for slot in crowd:
            load[slot] = load.get(slot, 0) + 1
        each = max(1, spec.devices_per_member)
        left = {name: list(devices) for name, devices in self._free.items()}
        chosen: list[tuple[str, tuple[DeviceReport, ...]]] = []
        refused: dict[str, int] = {}
        for _ in range(max(1, spec.members)):
            used = {slot for slot, _ in chosen}
            fitting = []
            for name, devices in left.items():
                if name in used:
                    refused["with another member"] = refused.get("with another member", 0) + 1
                elif why := closed_to(spec, self._slots[name]):
                    refused[why] = refused.get(why, 0) + 1
                elif apart and self._host(name) in hosts:
                    why = "on a host that has another instance of it (spread)"
                    refused[why] = refused.get(why, 0) + 1
                elif spec.engine not in self._slots[name].engines:
                    refused[f"without engine {spec.engine}"] = refused.get(f"without engine {spec.engine}", 0) + 1
                elif len(devices) < each:
                    refused["without enough free devices"] = refused.get("without enough free devices", 0) + 1
                elif 0 < sum(d.total_bytes for d in devices[:each]) < spec.memory_bytes:
                    refused["with too little memory"] = refused.get("with too little memory", 0) + 1
                else:
                    fitting.append((hosts[self._host(name)], load.get(name, 0), -len(devices), name))
            if not fitting:
                why = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
                return [], f"no slot has {each} free devices for it ({why or 'no slot is alive'})"
            name = min(fitting)[-1]
            chosen.append((name, tuple(left[name][:each])))
        return chosen, ""

    def _host(self, slot: str) -> str:
        """The host of a slot: slots of one boot are on one."""
        view = self._slots.get(slot)
        return (view.boot_id if view else "") or slot

    def take(self, chosen: Iterable[tuple[str, tuple[DeviceReport, ...]]]) -> None:
        """Makes the chosen devices unavailable."""
        for slot, devices in chosen:
            taken = {device.id for device in devices}
            self._free[slot] = [d for d in self._free[slot] if d.id not in taken]

    def kind(self, slot: str, device: str) -> str:
        """The kind of one device, or the empty string when the slot does not have it."""
        view = self._slots.get(slot)
        return next((d.kind for d in view.devices if d.id == device), "") if view else ""
