"""Several models on one device: who may live beside whom, and who gives way to whom."""

import dataclasses

import pytest

from relight.controller.decide.replicas import decide
from relight.controller.plan.devices import FreeDevices
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.controller.plan.yielding import FAIR_SECONDS
from relight.core import invariants
from relight.core.records import Burst, Demand, Desired, DeviceReport, Guardians, HeldLevel, Mode, ModelView, Snapshot
from relight.core.states import State
from support.planning import SPEC, instance, slot

NOW = 1000.0
NOBODY = Demand(0, 0.0, 0, 500.0)
WAITS = Demand(2, 1.0, 0, NOW)
TWO = Guardians(0, 2, max_per_device=2)


def spec(name, **changes):
    return dataclasses.replace(SPEC, name=name, **{"replicas": 0, "guardians": TWO, **changes})


def lives(name, model, state, where="a", since=1.0, **changes):
    view = instance(name, where, state, model, **changes)
    (member,) = view.members
    return dataclasses.replace(
        view, members=(dataclasses.replace(member, report=dataclasses.replace(member.report, since=since)),)
    )


def made(views, instances, slots=None, now=NOW):
    snapshot = Snapshot(now, 1, 1, tuple(views), tuple(slots or [slot("a")]), tuple(instances))
    count = iter(range(100))
    assert not invariants.no_device_is_claimed_twice(snapshot)
    return plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new{next(count)}")


def of(found, model):
    return [p for p in found.placements if p.model == model.key]


A, B = spec("a"), spec("b")


def test_an_idle_replica_that_requests_woke_gives_way_to_a_model_with_requests():
    views = [ModelView(A, NOBODY, activated_at=500.0), ModelView(B, WAITS)]
    found = made(views, [lives("i-a", A, State.READY), lives("i-b", B, State.DORMANT)])
    (goes,) = of(found, A)
    assert (goes.instance, goes.desired) == ("i-a", Desired.DRAINED)
    assert "default/b has 2 requests waiting, and it has none" in goes.reason
    assert of(found, B) == []
    assert any("waits for i-a to give way" in text for text in found.unplaced)
    # What woke it must ask anew: else it would be wanted back as soon as it sleeps.
    assert [(d.replicas, d.floor) for d in found.decisions if d.model == A.key] == [(0, 0)]


def test_the_guardian_wakes_once_the_other_one_sleeps_and_not_before():
    views = [ModelView(A, NOBODY), ModelView(B, WAITS)]
    going = lives("i-a", A, State.READY, desired=Desired.DRAINED, drained=False)
    asleep = lives("i-b", B, State.DORMANT)
    assert of(made(views, [going, asleep]), B) == []
    sleeping = lives("i-a", A, State.SLEEPING)
    assert of(made(views, [sleeping, asleep]), B) == []
    (wakes,) = of(made(views, [lives("i-a", A, State.DORMANT), asleep]), B)
    assert (wakes.instance, wakes.desired, wakes.mode) == ("i-b", Desired.READY, Mode.GUARDIAN)


@pytest.mark.parametrize(
    ("a", "demand", "why"),
    [
        (spec("a", replicas=1), NOBODY, "somebody wrote its number"),
        (spec("a", min_replicas=1), NOBODY, "its bounds want one"),
        (A, Demand(0, 0.0, 1, NOW), "it has a request"),
        (A, Demand(1, 0.1, 0, NOW), "it has a request waiting"),
        (A, None, "nobody knows what it has"),
    ],
)
def test_what_is_written_or_busy_or_unknown_stays(a, demand, why):
    views = [ModelView(a, demand, activated_at=500.0), ModelView(B, WAITS)]
    found = made(views, [lives("i-a", a, State.READY, since=NOW - 1), lives("i-b", B, State.DORMANT)])
    assert of(found, a) == [], why
    assert of(found, B) == []
    assert any("i-a of default/a awake on its device" in text for text in found.unplaced)


def test_what_somebody_wrote_goes_before_what_requests_woke():
    b = spec("b", replicas=1)
    views = [ModelView(A, NOBODY, activated_at=500.0), ModelView(b, NOBODY)]
    found = made(views, [lives("i-a", A, State.READY), lives("i-b", b, State.DORMANT)])
    assert [(p.instance, p.desired) for p in found.placements] == [("i-a", Desired.DRAINED)]
    assert "lacks a replica that somebody wrote" in found.placements[0].reason


def test_without_a_claim_nobody_is_sent_away():
    # Requests woke it once, and none is there any more: what is missing may stay so.
    views = [ModelView(A, NOBODY, activated_at=500.0), ModelView(B, NOBODY, activated_at=999.0)]
    found = made(views, [lives("i-a", A, State.READY), lives("i-b", B, State.DORMANT)])
    assert found.placements == ()


def test_a_busy_one_goes_when_the_other_has_waited_and_it_has_served_long_enough():
    busy = Demand(0, 0.0, 3, NOW)
    late = Demand(2, FAIR_SECONDS, 0, NOW)
    served = lives("i-a", A, State.READY, since=NOW - FAIR_SECONDS, in_flight=3)
    views = [ModelView(A, busy, activated_at=500.0), ModelView(B, late)]
    asleep = lives("i-b", B, State.DORMANT)
    (goes,) = of(made(views, [served, asleep]), A)
    assert "has served for as long" in goes.reason
    fresh = lives("i-a", A, State.READY, since=NOW - 1, in_flight=3)
    assert of(made(views, [fresh, asleep]), A) == []
    above = spec("a", priority=1)
    views = [ModelView(above, busy, activated_at=500.0), ModelView(B, late)]
    held = lives("i-a", above, State.READY, since=NOW - FAIR_SECONDS, in_flight=3)
    assert of(made(views, [held, asleep]), above) == []


def test_one_that_gives_way_is_not_wanted_back_by_requests_that_came_later():
    going = lives("i-a", A, State.DRAINING, desired=Desired.DRAINED, in_flight=3)
    asleep = lives("i-b", B, State.DORMANT)
    later, earlier = Demand(1, 0.5, 3, NOW), Demand(2, FAIR_SECONDS, 0, NOW)
    found = made([ModelView(A, later), ModelView(B, earlier)], [going, asleep])
    assert of(found, A) == []
    # Without the others it is.
    (back,) = of(made([ModelView(A, later), ModelView(B, NOBODY)], [going, asleep]), A)
    assert (back.instance, back.desired) == ("i-a", Desired.READY)


def test_when_both_sleep_who_has_waited_longer_wakes_first():
    views = [ModelView(A, WAITS, waits_since=NOW - 1), ModelView(B, WAITS, waits_since=NOW - 5)]
    found = made(views, [lives("i-a", A, State.DORMANT), lives("i-b", B, State.DORMANT)])
    assert [p.instance for p in found.placements] == ["i-b"]


def test_the_least_recently_used_of_the_lowest_priority_gives_way():
    first, second, third = spec("x", priority=1), spec("y"), spec("z")
    asker = spec("b")
    used = {first.key: 1.0, second.key: 90.0, third.key: 50.0}
    views = [ModelView(s, Demand(0, 0.0, 0, used[s.key]), activated_at=1.0) for s in (first, second, third)]
    slots = [slot(name) for name in "stu"]
    awake = [
        lives(f"i-{s.name}", s, State.READY, where) for s, where in zip((first, second, third), "stu", strict=True)
    ]
    guardians = [lives(f"i-b{where}", asker, State.DORMANT, where) for where in "stu"]
    found = made([*views, ModelView(asker, WAITS)], [*awake, *guardians], slots)
    assert [p.instance for p in found.placements if p.desired is Desired.DRAINED] == ["i-z"]


def test_a_burst_gives_way_and_the_written_replica_does_not():
    a = spec("a", replicas=1, burst=Burst(2, 60.0))

    levels = (HeldLevel(2, NOW - 1),)
    views = [ModelView(a, NOBODY, burst=levels), ModelView(B, WAITS)]
    slots = [slot("s"), slot("t")]
    awake = [lives("i-1", a, State.READY, "s"), lives("i-2", a, State.READY, "t")]
    found = made(views, [*awake, lives("i-b", B, State.DORMANT, "t")], slots)
    assert [p.instance for p in found.placements if p.desired is Desired.DRAINED] == ["i-2"]


def test_a_device_holds_as_many_engines_as_all_of_them_allow():
    sleeper = lives("i-a", A, State.DORMANT)
    written = spec("b", replicas=1)
    (starts,) = of(made([ModelView(A, NOBODY), ModelView(written, NOBODY)], [sleeper]), written)
    assert (starts.slots, starts.devices) == (("a",), (("d0",),))
    for alone in (spec("b", replicas=1, guardians=Guardians(0)),):
        assert of(made([ModelView(A, NOBODY), ModelView(alone, NOBODY)], [sleeper]), alone) == []
    shy = spec("a", guardians=Guardians(0))
    assert (
        of(made([ModelView(shy, NOBODY), ModelView(written, NOBODY)], [lives("i-a", shy, State.DORMANT)]), written)
        == []
    )


def test_two_engines_of_one_model_never_share_a_device():
    three = spec("a", replicas=0, guardians=Guardians(2, 2, max_per_device=3))
    found = made([ModelView(three, NOBODY)], [lives("i-a", three, State.DORMANT)])
    assert of(found, three) == []
    assert any("two are never awake" in text for text in found.unplaced)


def test_what_sleeps_counts_by_its_measured_bytes():
    large = spec("b", replicas=1, memory_bytes=900 << 20)
    full = DeviceReport("d0", "cpu", "d0", 1 << 30, 300 << 20)
    views = [ModelView(A, NOBODY), ModelView(large, NOBODY)]
    assert of(made(views, [lives("i-a", A, State.DORMANT)], [slot("a", devices=(full,))]), large) == []
    free = dataclasses.replace(full, used_bytes=50 << 20)
    assert len(of(made(views, [lives("i-a", A, State.DORMANT)], [slot("a", devices=(free,))]), large)) == 1


def test_guardians_of_several_models_are_made_one_after_the_other_on_a_device():
    a, b = (spec(n, guardians=Guardians(1, 2, max_per_device=2)) for n in "ab")
    found = made([ModelView(a, NOBODY), ModelView(b, NOBODY)], [])
    assert [p.model for p in found.placements] == [a.key]
    found = made([ModelView(a, NOBODY), ModelView(b, NOBODY)], [lives("i-a", a, State.DORMANT)])
    assert [(p.model, p.desired) for p in found.placements] == [(b.key, Desired.DORMANT)]


@pytest.mark.parametrize(("kind", "placed"), [("cpu", True), ("nvidia", False)])
def test_a_device_that_two_slots_of_a_host_have_gets_no_more_engines(kind: str, placed: bool) -> None:
    device = DeviceReport("GPU-1", kind, "GPU-1", 10, 0)
    slots = (slot("a", "boot", devices=(device,)), slot("b", "boot", devices=(device,)))
    chosen, why = FreeDevices(Snapshot(NOW, 1, 1, (), slots, ())).find(SPEC, ())
    assert bool(chosen) is placed
    assert placed or "without enough free devices" in why


def test_devices_of_equal_ids_on_two_hosts_are_two() -> None:
    device = DeviceReport("GPU-1", "nvidia", "GPU-1", 10, 0)
    slots = (slot("a", "boot", devices=(device,)), slot("b", "another", devices=(device,)))
    assert FreeDevices(Snapshot(NOW, 1, 1, (), slots, ())).find(SPEC, ())[0]
