"""From what is decided to what shall change: which instance, where, how, from whom. Zero I/O: core only.

The same snapshot, decisions, predictions and ids give the same plan; a fleet that is as decided gives an
empty one. Replicas of all models are placed before any guardian, so that a guardian never takes a device
that a missing replica needs; among models those of higher priority come first (order.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from relight.controller.plan.capable import closed_modes, no_sleep
from relight.controller.plan.devices import FreeDevices
from relight.controller.plan.fanout import share_out
from relight.controller.plan.fleet import ModelFleet, due, retry_at, same_runtime, sort_fleet
from relight.controller.plan.modes import STARTS, Chosen, choose, ruled_out, start_price, wake_price, with_sleep
from relight.controller.plan.order import in_turn
from relight.controller.plan.prices import Predictions
from relight.controller.plan.retire import (
    asleep_again,
    excess_guardians,
    excess_replicas,
    give_up_failed,
    move,
    retired,
    settle_drained,
)
from relight.controller.plan.rollout import leaving, make_room, next_step, set_stale_apart, unfit
from relight.controller.plan.sources import Ladder, Sources
from relight.controller.plan.yielding import Scene, promised, way_for, written
from relight.core.records import (
    Decision,
    Desired,
    InstanceView,
    Mode,
    ModelView,
    Placement,
    Plan,
    Price,
    Rung,
    RungKind,
    Snapshot,
)
from relight.core.states import State

NewId = Callable[[str], str]
# A guardian can be woken from these; one that is still starting goes on to ready instead of to sleep.
_WAKEABLE = (State.DORMANT, State.SLEEPING, State.STARTING, State.NONE)


def plan(snapshot: Snapshot, decisions: Sequence[Decision], predictions: Predictions, new_id: NewId) -> Plan:
    """The whole plan. Models that instances belong to and that nobody decided on are taken down."""
    return _Planner(snapshot, decisions, predictions, new_id).run()


def next_retry_at(snapshot: Snapshot) -> float | None:
    """The next wall time at which a failure may be tried again or a drain ends; None when none will."""
    times = [at for i in snapshot.instances if (at := retry_at(i)) is not None and at > snapshot.now]
    times += [
        i.drain_until
        for i in snapshot.instances
        if i.drain_until is not None and not i.drained and i.drain_until > snapshot.now
    ]
    return min(times, default=None)


class _Planner:
    def __init__(
        self, snapshot: Snapshot, decisions: Sequence[Decision], predictions: Predictions, new_id: NewId
    ) -> None:
        self._snapshot, self._predictions, self._new_id = snapshot, predictions, new_id
        self._decisions = tuple(decisions)
        self._views = {view.spec.key: view for view in snapshot.models}
        self._fleet = sort_fleet(snapshot)
        self._free = FreeDevices(snapshot)
        self._slots = {slot.slot: slot for slot in snapshot.slots}
        self._sources = Sources(snapshot)
        self._placements: list[Placement] = []
        self._unplaced: list[str] = []
        self._short: set[str] = set()
        """Pools in which a replica of some model waits for devices: no guardian may be placed there."""
        self._waiting: list[str] = []

    def run(self) -> Plan:
        decisions = {d.model: d for d in self._decisions}
        turns = in_turn(self._views.values(), self._snapshot.now)
        for key in (*sorted(self._fleet.keys() - self._views.keys()), *turns):
            decision = decisions.get(key) or Decision(key, 0, 0, "the model was deleted")
            self._replicas(self._views.get(key), self._fleet[key], decision)
        self._make_way()
        for key in turns:
            if key in decisions:
                self._guardians(self._views[key], self._fleet[key], decisions[key])
        # What a later step decides about an instance replaces what an earlier one did.
        last = self._shared_out({placement.instance: placement for placement in self._placements})
        placements, unplaced = tuple(last.values()), tuple(self._unplaced)
        return Plan(self._snapshot.revision, self._decisions, placements, unplaced, tuple(self._waiting))

    def _shared_out(self, placements: dict[str, Placement]) -> dict[str, Placement]:
        """The placements, with guardians of one model that wake at the same time reading from each other, too."""
        views = {i.instance: i for i in self._snapshot.instances if not i.remembered}
        wakes: dict[str, list[tuple[Placement, InstanceView]]] = defaultdict(list)
        for p in placements.values():
            if p.mode is Mode.GUARDIAN and p.desired is Desired.READY and p.rungs and p.instance in views:
                wakes[p.model].append((p, views[p.instance]))
        for model, group in wakes.items():
            if len(group) > 1 and (view := self._views.get(model)) is not None:
                rates = self._predictions.rates()
                placements |= share_out(group, self._sources, rates, encrypt=view.spec.encrypt)
        return placements

    def _replicas(self, view: ModelView | None, lists: ModelFleet, decision: Decision) -> None:
        self._placements += give_up_failed(lists)
        if view is not None and decision.replicas:
            set_stale_apart(view, lists, self._slots)
        self._placements += excess_replicas(view, lists, decision)
        if view is not None:
            missing = decision.replicas - len(lists.wanted)
            missing -= self._presumed(view, missing)
            if lists.stale:
                missing = min(missing, self._replace(view, lists, decision))
            missing = self._take_back(view, lists, missing)
            missing -= self._held_back(lists, Desired.READY, missing)
            placed = sum(1 for _ in itertools.takewhile(bool, (self._place(view, lists) for _ in range(missing))))
            if lists.stale and not placed and (old := make_room(view, lists, decision)) is not None:
                self._retire(view, lists, old, "it makes room for its replacement, as the strategy allows")
        lists.guardians += [i for i in lists.failed if asleep_again(i)]
        self._placements += settle_drained(view, lists, decision, self._slots)
        self._placements += excess_guardians(view, lists, decision, self._slots)

    def _presumed(self, view: ModelView, missing: int) -> int:
        """How many of the missing may stand already where nobody was heard of yet, each with its reason told."""
        key = view.spec.key
        there = [slot.slot for slot in self._snapshot.slots if slot.presumed == key][: max(0, missing)]
        self._unplaced += [f"{key}: {slot} was not heard of yet, and is said to have a replica" for slot in there]
        return len(there)

    def _make_way(self) -> None:
        """Lets what stands above a written number go for models whose requests wait for its devices."""
        for key in dict.fromkeys(self._waiting) if self._snapshot.synced else ():
            way = way_for(self._views[key], self._scene())
            for instance, why in way.goes:
                view, lists = self._views[instance.model], self._fleet[instance.model]
                lists.wanted.remove(instance)
                lists.draining.append(instance)
                self._placements.append(retired(view, instance, f"gives way: {why}"))
                self._lower(view, f"what stood above it gives way: {why}")
            if names := [*way.waits, *(i.instance for i, _ in way.goes)]:
                self._unplaced.append(f"{key}: waits for {', '.join(names)} to give way")

    def _scene(self) -> Scene:
        decisions = {d.model: d for d in self._decisions}
        return Scene(self._views, self._fleet, decisions, self._slots, self._free, self._snapshot.now)

    def _lower(self, view: ModelView, why: str) -> None:
        """Decides on the written number alone: whatever else woke the model must ask anew."""
        number = written(view.spec)
        told = f"{number} is the written number; {why}"
        self._decisions = tuple(
            replace(d, replicas=number, reason=told, floor=0, burst=()) if d.model == view.spec.key else d
            for d in self._decisions
        )

    def _replace(self, view: ModelView, lists: ModelFleet, decision: Decision) -> int:
        """Lets old replicas go whose replacement serves. Returns how many may be placed now."""
        step = next_step(view, lists, self._slots, decision)
        for instance, reason in step.retire:
            self._retire(view, lists, instance, reason)
        return step.place

    def _retire(self, view: ModelView, lists: ModelFleet, instance: InstanceView, reason: str) -> None:
        lists.stale.remove(instance)
        self._placements.append(retired(view, instance, reason))
        if self._placements[-1].desired is Desired.DORMANT:
            lists.guardians.append(instance)

    def _take_back(self, view: ModelView, lists: ModelFleet, missing: int) -> int:
        """Wants draining replicas back, as they are awake. Returns how many are missing still."""
        for instance in list(lists.draining):
            fits = not unfit(view.spec, instance, self._slots)
            if promised(view, instance, self._scene()):
                continue
            if missing > 0 and fits and instance.state in (State.READY, State.DRAINING):
                lists.draining.remove(instance)
                lists.wanted.append(instance)
                reason = "wanted again before it slept"
                self._placements.append(move(instance, Desired.READY, reason, operation=view.operation))
                missing -= 1
        return missing

    def _held_back(self, lists: ModelFleet, desired: Desired, missing: int) -> int:
        """How many of the missing wait because an instance failed, each with its reason told."""
        if missing <= 0:
            return 0
        fresh = [i for i in lists.failed if i.desired is desired]
        old = [i for i in lists.remembered if i.desired is desired and not due(i, self._snapshot.now)]
        held = (old + fresh)[:missing]
        for instance in held:
            at = retry_at(instance)
            when = "is not tried again by itself" if at is None else f"is tried again at {at:.3f}"
            why = instance.failure.reason if instance.failure else "it ended although it was wanted"
            self._unplaced.append(f"{instance.model}: {instance.instance} failed and {when}: {why}")
            if at is not None:
                self._short.add(instance.spec.pool)
        return len(held)

    def _place(self, view: ModelView, lists: ModelFleet) -> bool:
        """Places one missing replica by the mode that its model names, or by the fastest that fits."""
        spec = view.spec
        wake = self._best_wake(view, lists)
        crowd = [m.slot for i in (*lists.wanted, *lists.stale) for m in i.members]
        chosen, no_room = self._free.find(spec, crowd, self._around(spec.key, lists))
        if not self._snapshot.synced:
            chosen, no_room = [], "not every slot was heard of yet, and one may run it already"
        ladder = self._sources.fresh(spec, chosen, view.allowed_rungs)
        failed = {
            **closed_modes(spec, self._slots, tuple(name for name, _ in chosen)),
            **ruled_out(i for i in lists.remembered if i.desired is Desired.READY),
        }
        starts = (start_price(m, spec, chosen, no_room, ladder, self._predictions, failed) for m in STARTS)
        prices = (wake[1] if wake else self._no_guardian(lists), *starts)
        best, why = choose(spec.mode, prices)
        if best is None:
            self._short.add(spec.pool)
            self._waiting.append(spec.key)
            self._unplaced.append(f"{spec.key}: a replica is missing and nothing fits ({why})")
            return False
        if best.mode is not Mode.GUARDIAN or wake is None:
            self._start(view, chosen, Desired.READY, best, why, prices, ladder, view.operation)
            return True
        instance, _, ladder = wake
        self._free.wake(instance)
        lists.guardians.remove(instance)
        lists.wanted.append(instance)
        self._sources.note_reader(ladder.rungs)
        self._placements.append(
            Placement(
                instance=instance.instance,
                model=spec.key,
                desired=Desired.READY,
                mode=Mode.GUARDIAN,
                level=instance.level,
                slots=tuple(m.slot for m in instance.members),
                devices=tuple(m.devices for m in instance.members),
                rungs=ladder.rungs,
                reason=_told(best, why, ladder.refused),
                predicted_seconds=best.seconds,
                prices=prices,
                operation=view.operation,
            )
        )
        return True

    def _around(self, key: str, lists: ModelFleet) -> list[str]:
        """The slots of all instances of a model, those that were placed just now among them."""
        there = (*lists.wanted, *lists.stale, *lists.draining, *lists.guardians)
        placed = (s for p in self._placements if p.model == key and p.desired is not Desired.GONE for s in p.slots)
        return [*dict.fromkeys([*(m.slot for i in there for m in i.members), *placed])]

    def _best_wake(self, view: ModelView, lists: ModelFleet) -> tuple[InstanceView, Price, Ladder] | None:
        barred = {i.instance for i in lists.remembered if not due(i, self._snapshot.now)}
        crowd = [m.slot for i in (*lists.wanted, *lists.stale) for m in i.members]
        options = []
        for instance in lists.guardians:
            if (
                instance.instance in barred
                or instance.state not in _WAKEABLE
                or leaving(view.spec, instance, self._slots)
                or not same_runtime(view.spec, instance.spec)
            ):
                continue
            ladder = self._sources.ladder(view.spec, instance, view.allowed_rungs)
            devices = instance.members[0].devices
            kind = self._free.kind(instance.members[0].slot, devices[0]) if devices else ""
            price = wake_price(view.spec, instance, ladder, kind, self._predictions)
            if beside := self._free.awake_beside(instance):
                told = ", ".join(f"{t.instance} of {t.model}" for t in beside)
                price = Price(Mode.GUARDIAN, 0.0, False, f"{instance.instance} has {told} awake on its device")
            load = sum(crowd.count(m.slot) for m in instance.members)
            asleep = _WAKEABLE.index(instance.state)
            options.append(((not price.fits, asleep, price.seconds, load, instance.instance), instance, price, ladder))
        if not options:
            return None
        _, instance, price, ladder = min(options, key=lambda option: option[0])
        return instance, price, ladder

    def _no_guardian(self, lists: ModelFleet) -> Price:
        failed = len(lists.remembered)
        reason = "no guardian of it stands by" + (f" ({failed} failed)" if failed else "")
        return Price(Mode.GUARDIAN, 0.0, False, reason)

    def _start(
        self,
        view: ModelView,
        chosen: Chosen,
        desired: Desired,
        price: Price,
        why: str,
        prices: tuple[Price, ...],
        ladder: Ladder,
        operation: str,
    ) -> None:
        """Places a new instance; a cold one starts by itself, whatever the ladder has."""
        rungs, refused = ladder.rungs, ladder.refused
        if price.mode is Mode.COLD:
            rungs, refused = (Rung(RungKind.DISK, "a cold start reads the checkpoint"),), ()
        name = self._new_id("i")
        self._free.take(view.spec, name, list(chosen))
        self._sources.note_reader(rungs)
        self._placements.append(
            Placement(
                instance=name,
                model=view.spec.key,
                desired=desired,
                mode=price.mode,
                level=view.spec.guardians.level,
                slots=tuple(slot for slot, _ in chosen),
                devices=tuple(tuple(d.id for d in devices) for _, devices in chosen),
                rungs=rungs,
                reason=_told(price, why, refused),
                predicted_seconds=price.seconds,
                prices=prices,
                operation=operation,
            )
        )

    def _guardians(self, view: ModelView, lists: ModelFleet, decision: Decision) -> None:
        # A drained replica on its way may become the guardian that is missing: starting one beside it
        # would only be ended again.
        spec = view.spec
        missing = decision.guardians - len(lists.guardians) - len(lists.draining)
        missing -= self._held_back(lists, Desired.DORMANT, missing)
        # Everything must be warmed up before it sleeps, because its wake has no time for it: never lazy.
        wanted = Mode.COLD if spec.mode is Mode.COLD else Mode.NORMAL
        for _ in range(missing):
            if not self._snapshot.synced:
                self._unplaced.append(f"{spec.key}: a guardian waits: not every slot was heard of yet")
                return
            if spec.pool in self._short:
                self._unplaced.append(f"{spec.key}: a guardian waits: replicas need the devices first")
                return
            crowd = [m.slot for i in (*lists.wanted, *lists.stale, *lists.guardians) for m in i.members]
            crowd += [s for p in self._placements if p.model == spec.key for s in p.slots]
            chosen, no_room = self._free.find(
                spec, crowd, self._around(spec.key, lists), unable=no_sleep(spec, self._slots)
            )
            ladder = self._sources.fresh(spec, chosen, ())
            failed = ruled_out(i for i in lists.remembered if i.desired is Desired.DORMANT)
            kind = chosen[0][1][0].kind if chosen and chosen[0][1] else ""
            prices = tuple(
                with_sleep(
                    start_price(mode, spec, chosen, no_room, ladder, self._predictions, failed),
                    spec,
                    kind,
                    self._predictions,
                )
                for mode in (Mode.NORMAL, Mode.COLD)
            )
            best, why = choose(wanted, prices)
            if best is None:
                self._unplaced.append(f"{spec.key}: a guardian is missing: {no_room or why}")
                return
            self._start(view, chosen, Desired.DORMANT, best, why, prices, ladder, "")


def _told(price: Price, why: str, refused: Sequence[str]) -> str:
    return f"{price.mode} in {price.seconds:.3f} s, {why}: {price.reason}" + (
        f" (not by {'; '.join(refused)})" if refused else ""
    )
