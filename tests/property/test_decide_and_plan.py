"""Deciding and planning over generated fleets with an agent that does at once what it is told."""

import dataclasses
import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from relight.controller.decide.replicas import decide, next_idle_at
from relight.controller.plan.plan import next_retry_at, plan
from relight.controller.plan.prices import Predictions
from relight.core.fingerprint import Fingerprint
from relight.core.records import (
    Demand,
    Desired,
    DeviceReport,
    Endpoint,
    Failure,
    Guardians,
    InstanceReport,
    InstanceView,
    Keep,
    MemberView,
    Mode,
    ModelSpec,
    ModelView,
    ScaleToZero,
    SlotView,
    Snapshot,
    SourceOffer,
)
from relight.core.states import State

NOW = 1_000_000.0
OFFER = SourceOffer(1, "d", "c", "", {"shm": "unix:/s", "tcp": "tcp:h:1"}, 1 << 20)
ANY_NUMBER = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, NOW, NOW - 100]) | st.floats()
ANY_INT = st.sampled_from([-(10**18), -1, 0, 1, 2, 64, 10**18])
AFTER = {
    Desired.READY: State.READY,
    Desired.DORMANT: State.DORMANT,
    Desired.DRAINED: State.DRAINING,
    Desired.GONE: State.GONE,
}


@st.composite
def specs(draw, name):
    return ModelSpec(
        namespace="default",
        name=name,
        uri=f"/models/{name}",
        revision=draw(st.sampled_from(["r1", "r2"])),
        engine="stub",
        members=draw(st.sampled_from([1, 1, 1, 2])),
        devices_per_member=draw(st.sampled_from([1, 1, 2])),
        replicas=draw(st.integers(0, 4)),
        max_replicas=draw(st.integers(0, 5)),
        guardians=Guardians(draw(st.integers(0, 2)), draw(st.sampled_from([1, 2]))),
        mode=draw(st.sampled_from(list(Mode))),
        scale_to_zero=ScaleToZero(keep=draw(st.sampled_from(list(Keep)))),
    )


def report(view_id, spec, rank, devices, state, failure=None):
    return InstanceReport(
        instance=view_id,
        model=spec.key,
        rank=rank,
        members=spec.members,
        devices=devices,
        state=state,
        since=NOW - 5,
        cause="told",
        incarnation=1,
        endpoint=Endpoint("http://127.0.0.1:1", "m") if state is State.READY else None,
        source=SourceOffer(1, "d", "c", "", {"shm": "unix:/s", "tcp": "tcp:h:1"}, 1 << 20)
        if state is State.READY
        else None,
        relay=SourceOffer(1, "", "", "l", {"shm": "unix:/r", "tcp": "tcp:h:2"}, 0) if state is State.DORMANT else None,
        fingerprint=Fingerprint(layout={"dtype": "bf16"}),
        failure=failure,
    )


@st.composite
def fleets(draw):
    slots = tuple(
        SlotView(
            f"s{n}",
            draw(st.sampled_from([True, True, True, False])),
            draw(st.sampled_from(["boot-a", "boot-b"])),
            draw(st.booleans()),
            {"stub": "1"},
            tuple(
                DeviceReport(f"d{d}", "cpu", "p", 1 << 30, 0, healthy=draw(st.sampled_from([True, True, False])))
                for d in range(draw(st.integers(0, 3)))
            ),
        )
        for n in range(draw(st.integers(1, 4)))
    )
    models = tuple(
        ModelView(draw(specs(name)), draw(st.none() | st.just(Demand(0, 0.0, 0, NOW))), operation="op-1")
        for name in ("a", "b")[: draw(st.integers(1, 2))]
    )
    free = {(s.slot, d.id) for s in slots for d in s.devices}
    instances = []
    for n in range(draw(st.integers(0, 4))):
        spec = draw(st.sampled_from([m.spec for m in models]))
        chosen = []
        for _ in range(spec.members):
            used = [s for s, _ in chosen]
            roomy = [
                x.slot
                for x in slots
                if x.slot not in used and sum(f == x.slot for f, _ in free) >= spec.devices_per_member
            ]
            if roomy:
                slot = draw(st.sampled_from(roomy))
                own = sorted(d for s, d in free if s == slot)[: spec.devices_per_member]
                free -= {(slot, d) for d in own}
                chosen.append((slot, tuple(own)))
        if len(chosen) < spec.members:
            continue
        desired = draw(st.sampled_from(list(Desired)))
        state = draw(st.sampled_from([AFTER[desired], State.STARTING, State.WAKING, State.FAILED, State.NONE]))
        failure = Failure("broken", draw(st.none() | st.just(5.0))) if state is State.FAILED else None
        members = tuple(
            MemberView(chosen[r][0], r, chosen[r][1], report(f"i-{n}", spec, r, (), state, failure))
            for r in range(spec.members)
        )
        instances.append(
            InstanceView(f"i-{n}", spec.key, spec, members, desired, state, 2, "", Mode.COLD, failure, NOW)
        )
    return Snapshot(NOW, 1, 1, models, slots, tuple(instances), draw(st.sampled_from([True, True, False])))


def ids():
    counter = itertools.count()
    return lambda prefix: f"{prefix}-new{next(counter):04d}"


def obey(snapshot, made):
    """The fleet after an ideal agent did what the plan says, and the drained were seen drained."""
    views = {i.instance: i for i in snapshot.instances}
    specs_by_key = {m.spec.key: m.spec for m in snapshot.models}
    for placement in made.placements:
        old = views.get(placement.instance)
        spec = old.spec if old else specs_by_key[placement.model]
        if old and old.failure:
            views[f"{old.instance}-memory"] = dataclasses.replace(
                old, instance=f"{old.instance}-memory", members=(), remembered=True
            )
        state = AFTER[placement.desired]
        if state is State.GONE:
            views.pop(placement.instance, None)
            continue
        members = tuple(
            MemberView(slot, rank, devices, report(placement.instance, spec, rank, devices, state))
            for rank, (slot, devices) in enumerate(zip(placement.slots, placement.devices, strict=True))
        )
        views[placement.instance] = InstanceView(
            placement.instance,
            placement.model,
            spec,
            members,
            placement.desired,
            state,
            placement.level,
            placement.operation,
            placement.mode,
            drained=placement.desired is Desired.DRAINED,
        )
    settled = []
    alive = {s.slot for s in snapshot.slots if s.alive}
    for view in views.values():
        if not view.remembered and all(m.slot in alive for m in view.members):
            if view.desired is Desired.GONE:
                continue
            if view.state is not State.FAILED and not view.failure:
                view = dataclasses.replace(
                    view,
                    state=AFTER[view.desired],
                    drained=view.desired is Desired.DRAINED,
                    members=tuple(
                        dataclasses.replace(
                            m, report=report(view.instance, view.spec, m.rank, m.devices, AFTER[view.desired])
                        )
                        for m in view.members
                    ),
                )
        settled.append(view)
    return dataclasses.replace(snapshot, instances=tuple(settled))


def claims(snapshot):
    return [(m.slot, d) for i in snapshot.instances if not i.remembered for m in i.members for d in m.devices]


@settings(max_examples=300, deadline=None)
@given(fleets())
def test_a_fleet_converges_and_then_nothing_is_planned(snapshot):
    new_id = ids()
    rounds = []
    for _ in range(15):
        made = plan(snapshot, decide(snapshot), Predictions(), new_id)
        rounds.append(made.placements)
        snapshot = obey(snapshot, made)
        assert len(claims(snapshot)) == len(set(claims(snapshot)))
    assert rounds[-3:] == [(), (), ()]


@settings(max_examples=300, deadline=None)
@given(fleets())
def test_a_plan_claims_only_free_healthy_devices_of_living_slots_and_is_the_same_again(snapshot):
    decisions = decide(snapshot)
    made = plan(snapshot, decisions, Predictions(), ids())
    assert made == plan(snapshot, decisions, Predictions(), ids())
    taken = set(claims(snapshot))
    known = {i.instance for i in snapshot.instances}
    usable = {(s.slot, d.id) for s in snapshot.slots if s.alive for d in s.devices if d.healthy}
    assert len({p.instance for p in made.placements}) == len(made.placements)
    for placement in made.placements:
        if placement.instance in known:
            continue
        fresh = {(s, d) for s, ds in zip(placement.slots, placement.devices, strict=True) for d in ds}
        assert fresh <= usable - taken
        taken |= fresh
    for placement in made.placements:
        assert placement.reason


@st.composite
def mixed_fleets(draw):
    """Ready replicas and guardians of one model, each started in its own way, on slots that differ."""
    started = st.builds(
        dataclasses.replace,
        st.just(ModelSpec("default", "m", "/m", "r1", "stub", replicas=9, mode=draw(st.sampled_from(list(Mode))))),
        revision=st.sampled_from(["r1", "r1", "r2"]),
        args=st.sampled_from([(), (), ("--dtype", "float32")]),
        env=st.sampled_from([{}, {}, {"A": "1"}]),
        devices_per_member=st.sampled_from([1, 1, 2]),
    )
    slots, instances = [], []
    for n in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(["cpu", "gpu"]))
        devices = tuple(DeviceReport(f"d{d}", kind, "p", 1 << 30, 0) for d in range(2))
        version = draw(st.sampled_from(["1", "1", "2"]))
        slots.append(SlotView(f"s{n}", True, draw(st.sampled_from(["x", "y"])), False, {"stub": version}, devices))
        state = draw(st.sampled_from([None, State.READY, State.READY, State.DORMANT, State.STARTING]))
        if state is None:
            continue
        spec = draw(started)
        own = tuple(d.id for d in devices[: spec.devices_per_member])
        told = report(f"i-{n}", spec, 0, own, state)
        # What an engine says of itself: all that its start and its place decide.
        layout = {"args": str(spec.args), "env": str(spec.env), "engine": version, "device": kind * len(own)}
        told = dataclasses.replace(
            told, fingerprint=None if state is State.STARTING else Fingerprint(layout, {"revision": spec.revision})
        )
        desired = Desired.READY if state is State.READY else Desired.DORMANT
        members = (MemberView(f"s{n}", 0, own, told),)
        instances.append(InstanceView(f"i-{n}", spec.key, spec, members, desired, state, 2, "", Mode.NORMAL))
    view = ModelView(draw(started), Demand(0, 0.0, 0, NOW), "op-1")
    return Snapshot(NOW, 1, 1, (view,), tuple(slots), tuple(instances))


def layout_at(spec, slot, devices):
    """The layout that an engine started for `spec` on these devices will have."""
    kinds = "".join(d.kind for d in slot.devices if d.id in devices)
    return {"args": str(spec.args), "env": str(spec.env), "engine": slot.engines["stub"], "device": kinds}


@settings(max_examples=500, deadline=None)
@given(mixed_fleets())
def test_no_plan_offers_a_source_of_another_layout_or_content(snapshot):
    slots = {s.slot: s for s in snapshot.slots}
    views = {i.instance: i for i in snapshot.instances}
    (model,) = snapshot.models
    for placement in plan(snapshot, decide(snapshot), Predictions(), ids()).placements:
        started = views[placement.instance].spec if placement.instance in views else model.spec
        (where,), (devices,) = placement.slots, placement.devices
        for rung in placement.rungs:
            for reference in (rung.source, *rung.helpers):
                if reference is None:
                    continue
                source = views[reference.instance]
                said = source.members[0].report.fingerprint
                assert said.layout == layout_at(started, slots[where], devices)
                assert said.content == {"revision": model.spec.revision}


@settings(max_examples=200, deadline=None)
@given(fleets())
def test_while_slots_are_unheard_of_nothing_ready_is_taken_down(snapshot):
    snapshot = dataclasses.replace(snapshot, synced=False)
    serving = {i.instance for i in snapshot.instances if i.desired is Desired.READY and i.state is State.READY}
    made = plan(snapshot, decide(snapshot), Predictions(), ids())
    assert not [p for p in made.placements if p.instance in serving and p.desired is not Desired.READY]


@settings(max_examples=500, deadline=None)
@given(
    replicas=ANY_INT,
    most=ANY_INT,
    guardians=ANY_INT,
    idle=st.none() | ANY_NUMBER,
    demand=st.none() | st.builds(Demand, ANY_INT, ANY_NUMBER, ANY_INT, st.none() | ANY_NUMBER),
    changed=ANY_NUMBER,
    activated=st.none() | ANY_NUMBER,
    idled=st.none() | ANY_NUMBER,
    now=ANY_NUMBER,
    synced=st.booleans(),
)
def test_a_decision_is_total_bounded_and_explained(
    replicas, most, guardians, idle, demand, changed, activated, idled, now, synced
):
    spec = ModelSpec(
        "default", "m", "/m", "r", "stub",
        replicas=replicas, max_replicas=most, guardians=Guardians(guardians, 2),
        scale_to_zero=ScaleToZero(idle),
    )  # fmt: skip
    view = ModelView(spec, demand, changed_at=changed, activated_at=activated, idled_at=idled)
    snapshot = Snapshot(now, 1, 1, (view,), (), (), synced)
    (decision,) = decide(snapshot)
    assert 0 <= decision.replicas <= max(0, most)
    assert decision.guardians >= 0
    assert decision.reason
    if demand is None and idled is None:
        assert decision.replicas >= min(max(0, replicas), max(0, most))
    at = next_idle_at(snapshot)
    assert at is None or (math.isfinite(at) and at > now)
    next_retry_at(snapshot)
