"""Which devices have room for what: one engine that is awake, and beside it as many that sleep as all of them allow.

Zero I/O: core only. Taking some makes them unavailable for the rest of a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from relight.controller.plan.fleet import closed_to
from relight.core.records import Desired, DeviceReport, InstanceView, ModelSpec, SlotView, Snapshot, Spread
from relight.core.states import State

Place = tuple[str, str]
"""A slot and a device of it."""
Chosen = list[tuple[str, tuple[DeviceReport, ...]]]
"""A slot and its devices for each member of one instance."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """An engine that lives on a device. `limit`: how many its model wants there at most, this one among them."""

    instance: str
    model: str
    limit: int
    asleep: bool
    """It holds what a sleep leaves behind, and nobody wants it awake."""


def asleep(instance: InstanceView) -> bool:
    """Whether another engine may be awake on its devices."""
    return instance.desired is Desired.DORMANT and instance.state is State.DORMANT and instance.failure is None


class FreeDevices:
    """The devices of all slots that are alive, with who lives on each."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._slots: dict[str, SlotView] = {s.slot: s for s in snapshot.slots if s.alive}
        self._tenants: dict[Place, dict[str, Tenant]] = {}
        for instance in snapshot.instances:
            if instance.remembered:
                continue
            found = Tenant(instance.instance, instance.model, _limit(instance.spec), asleep(instance))
            for place in places_of(instance):
                self._tenants.setdefault(place, {})[found.instance] = found
        known = {i.instance for i in snapshot.instances}
        claimed = _claims(self._slots.values())
        self._usable: dict[str, list[DeviceReport]] = {
            name: [
                device
                for device in sorted(slot.devices, key=lambda d: d.id)
                if device.healthy
                and all(holder.instance in known for holder in device.holders)
                and claimed[slot.boot_id, device.id] <= 1
            ]
            for name, slot in sorted(self._slots.items())
        }

    def find(
        self,
        spec: ModelSpec,
        crowd: Iterable[str],
        around: Iterable[str] = (),
        but_for: Collection[str] = (),
        unable: Mapping[str, str] | None = None,
    ) -> tuple[Chosen, str]:
        """A slot and its devices for every member of one instance of `spec`, or nothing and the reason.

        Every member has a slot of its own: an agent knows an instance by its id alone.
        `crowd` names the slots of the model's other instances, once each: emptier slots are preferred. `around` names
        those from whose hosts this one shall keep away, where the model asks for that. The instances of `but_for` count
        as asleep. Slots that are `unable` are left out for the reason given.
        """
        hosts = Counter(self._host(slot) for slot in around if spec.guardians.spread is not Spread.NONE)
        apart = spec.guardians.spread is Spread.REQUIRED
        load = Counter(crowd)
        each = max(1, spec.devices_per_member)
        chosen: Chosen = []
        refused: Counter[str] = Counter()
        for _ in range(max(1, spec.members)):
            used = {slot for slot, _ in chosen}
            fitting = []
            for name in self._usable:
                devices, crowded = self._room(name, spec, but_for)
                if name in used:
                    refused["with another member"] += 1
                elif why := closed_to(spec, self._slots[name]) or (unable or {}).get(name, ""):
                    refused[why] += 1
                elif apart and self._host(name) in hosts:
                    refused["on a host that has another instance of it (spread)"] += 1
                elif spec.engine not in self._slots[name].engines:
                    locked = self._slots[name].facts.get(f"refused/{spec.engine}")
                    refused[f"without matching versions ({locked})" if locked else f"without engine {spec.engine}"] += 1
                elif len(devices) < each:
                    refused[crowded or "without enough free devices"] += 1
                elif 0 < sum(d.total_bytes for d in devices[:each]) < spec.memory_bytes:
                    refused["with too little memory"] += 1
                else:
                    sleepers = sum(len(self._tenants.get((name, d.id), ())) for d in devices[:each])
                    fitting.append((hosts[self._host(name)], load[name], sleepers, -len(devices), name))
            if not fitting:
                told = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
                return [], f"no slot has {each} free devices for it ({told or 'no slot is alive'})"
            name = min(fitting)[-1]
            chosen.append((name, tuple(self._room(name, spec, but_for)[0][:each])))
        return chosen, ""

    def _room(self, slot: str, spec: ModelSpec, but_for: Collection[str]) -> tuple[list[DeviceReport], str]:
        """The devices of `slot` with room for an engine of `spec`, the emptiest first; why others that sleep keep it
        from one, if they do."""
        found, crowded = [], ""
        for device in self._usable[slot]:
            tenants = self._tenants.get((slot, device.id), {}).values()
            if any(not t.asleep and t.instance not in but_for for t in tenants):
                continue
            if len(tenants) >= (most := min([_limit(spec), *(t.limit for t in tenants)])):
                crowded = crowded if most == 1 else "with as many engines on a device as their models allow"
            elif any(t.model == spec.key for t in tenants):
                crowded = "with an engine of it on the device, and two are never awake"
            elif tenants and device.total_bytes < device.used_bytes + spec.memory_bytes:
                crowded = "with too little memory beside those that sleep there"
            else:
                found.append(device)
        found.sort(key=lambda d: (len(self._tenants.get((slot, d.id), ())), d.id))
        return found, crowded

    def awake_beside(self, instance: InstanceView) -> tuple[Tenant, ...]:
        """The others on the devices of `instance` because of which it cannot wake now, in the order of their ids."""
        found = {
            name: tenant
            for place in places_of(instance)
            for name, tenant in self._tenants.get(place, {}).items()
            if name != instance.instance and not tenant.asleep
        }
        return tuple(found[name] for name in sorted(found))

    def take(self, spec: ModelSpec, instance: str, chosen: Chosen) -> None:
        """A new engine begins on the chosen devices."""
        for slot, devices in chosen:
            for device in devices:
                tenant = Tenant(instance, spec.key, _limit(spec), asleep=False)
                self._tenants.setdefault((slot, device.id), {})[instance] = tenant

    def wake(self, instance: InstanceView) -> None:
        """A guardian wakes where it is."""
        for place in places_of(instance):
            tenants = self._tenants.setdefault(place, {})
            tenants[instance.instance] = replace(tenants[instance.instance], asleep=False)

    def kind(self, slot: str, device: str) -> str:
        """The kind of one device, or the empty string when the slot does not have it."""
        view = self._slots.get(slot)
        return next((d.kind for d in view.devices if d.id == device), "") if view else ""

    def _host(self, slot: str) -> str:
        """The host of a slot: slots of one boot are on one."""
        view = self._slots.get(slot)
        return (view.boot_id if view else "") or slot


def _claims(slots: Iterable[SlotView]) -> Counter[Place]:
    """How many slots of one host, by its boot, have each device. Two of one were given the same, and neither gets more:
    whose it is nobody here can say. Cores have names that slots choose."""
    return Counter((slot.boot_id, d.id) for slot in slots for d in slot.devices if d.kind != "cpu")


def _limit(spec: ModelSpec) -> int:
    return max(1, spec.guardians.max_per_device)


def places_of(instance: InstanceView) -> tuple[Place, ...]:
    """Every device that its members have."""
    return tuple((member.slot, device) for member in instance.members for device in member.devices)
