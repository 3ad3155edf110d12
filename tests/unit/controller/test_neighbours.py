"""Whose doors each slot is told to try, how often it is told, and what a plan makes of what came of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.controller.decide.replicas import decide
from relight.controller.observe.neighbours import EVERY_SECONDS, GRANT_SECONDS, MOST, Neighbourhoods, doors_of
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core.errors import Denied
from relight.core.records import Demand, Guardians, ModelView, Reach, RungKind, Snapshot, Verdict
from relight.core.states import State
from relight.transfer.grants import check
from support.planning import SPEC, instance, kinds, offers, relays, slot

NOW = 1000.0
KEY = "ab" * 32


def ready(name="i-a", where="a", **changes):
    offer = replace(offers("shm", "tcp", "rdma"), grant_key=KEY)
    return instance(name, where, State.READY, offer=offer, **changes)


def asleep(name="i-b", where="b", **changes):
    return instance(name, where, State.DORMANT, relay=replace(relays("shm", "tcp"), grant_key=KEY), **changes)


def seen(slots, instances, now=NOW, synced=True):
    return Snapshot(now, 1, 1, (), tuple(slots), tuple(instances), synced)


def tried(snapshot):
    return {
        name: [(d.door.slot, d.door.transport) for d in doors] for name, doors in doors_of(snapshot).items() if doors
    }  # fmt: skip


def test_slots_of_one_model_try_each_other_by_what_could_reach() -> None:
    cards = {"rdma": ""}
    slots = [slot("a", transports=cards), slot("b"), slot("c", "other", transports=cards), slot("idle")]
    found = tried(seen(slots, [ready(), asleep(), asleep("i-c", "c")]))
    assert found == {
        "a": [("b", "shm"), ("b", "tcp"), ("c", "tcp")],
        "b": [("c", "tcp"), ("a", "shm"), ("a", "tcp")],
        "c": [("a", "tcp"), ("a", "rdma"), ("b", "tcp")],
    }


def test_what_is_ready_is_tried_before_a_sleeper_beside_it() -> None:
    (door, *_) = doors_of(seen([slot("a"), slot("b")], [asleep("i-0", "a"), ready("i-9", "a"), asleep()]))["b"]
    assert door.door.instance == "i-9"


def test_of_an_engine_of_several_ranks_the_first_is_tried() -> None:
    offer = replace(offers("tcp"), addresses={"tcp": "tcp:h:1,tcp:h:2"}, grant_key=KEY)
    there = instance("i-a", "a", State.READY, offer=offer)
    (door,) = doors_of(seen([slot("a"), slot("b", "other")], [there, asleep()]))["b"]
    assert door.door.address == "tcp:h:1"


def test_nothing_is_tried_between_tenants_or_models() -> None:
    other = replace(SPEC, name="n")
    slots = [slot("a", pool="x/pool"), slot("b", pool="y/pool"), slot("c", pool="x/pool")]
    assert tried(seen(slots, [ready(), asleep()])) == {}
    assert tried(seen(slots, [ready(), asleep("i-c", "c", spec=other)])) == {}


@settings(deadline=None)
@given(st.integers(1, 60))
def test_however_large_the_fleet_a_slot_tries_a_few_others(count: int) -> None:
    slots = [slot(f"s{n:02}", f"h{n}") for n in range(count)]
    found = tried(seen(slots, [asleep(f"i-{n}", s.slot) for n, s in enumerate(slots)]))
    for name, doors in found.items():
        others = {there for there, _ in doors}
        assert len(others) == min(MOST, count - 1)
        assert name not in others
    if 1 < count <= MOST + 1:
        assert {(a, b) for a, doors in found.items() for b, _ in doors} == {
            (a.slot, b.slot) for a in slots for b in slots if a is not b
        }


def test_changes_are_told_together_after_a_while_and_grants_are_renewed() -> None:
    told = []
    known = Neighbourhoods()
    known.listen(lambda: told.append(known.present.revision))
    slots = [slot("a"), slot("b")]
    known.update(1, seen(slots, [], NOW))
    assert known.told("a") is None
    assert known.due_at(NOW) is None
    known.update(1, seen(slots, [ready(), asleep()], NOW))
    assert len(told) == 1
    for step in range(5):
        known.update(1, seen(slots, [ready(), asleep(f"i-{step}")], NOW + step))
    assert len(told) == 1
    assert known.due_at(NOW + 5) == NOW + EVERY_SECONDS
    known.update(1, seen(slots, [ready(), asleep("i-9")], NOW + EVERY_SECONDS))
    assert len(told) == 2
    assert told[1] > told[0]
    for step in range(3):
        known.update(1, seen(slots, [ready(), asleep("i-9")], NOW + 2 * EVERY_SECONDS + step))
    assert len(told) == 2
    later = known.due_at(NOW + 100)
    known.update(1, seen(slots, [ready(), asleep("i-9")], later))
    assert len(told) == 3
    known.update(2, seen(slots, [ready(), asleep("i-9")], later + EVERY_SECONDS))
    assert told[3] >> 32 == 2
    known.update(2, seen(slots, [], later + 900, synced=False))
    assert len(told) == 4


def test_whoever_failed_once_is_told_at_once_where_that_engine_is_now() -> None:
    known = Neighbourhoods()
    known.update(1, seen([slot("a"), slot("b")], [ready(), asleep()]))
    failed = replace(slot("b"), reach=(Reach("a", "tcp", Verdict.UNKNOWN, "refused", NOW),))
    known.update(1, seen([slot("a"), failed], [ready(), asleep()], NOW + 1))
    first = known.present.revision
    known.update(1, seen([slot("a"), failed], [ready("i-z"), asleep()], NOW + 2))
    assert known.present.revision > first
    assert next(d for d in known.told("b").doors if d.transport == "tcp").instance == "i-z"


def test_a_grant_to_try_names_the_slot_and_lets_nobody_read() -> None:
    known = Neighbourhoods()
    known.update(1, seen([slot("a"), slot("b")], [ready(), asleep()]))
    door = next(d for d in known.told("b").doors if d.transport == "tcp")
    claims = check(KEY, door.grant, now=NOW, source_instance="i-a", generation=1, manifest_digest=str)
    assert (claims.receiver, claims.tries) == ("b", True)
    with pytest.raises(Denied, match="expired"):
        check(KEY, door.grant, now=NOW + GRANT_SECONDS, source_instance="i-a", generation=1, manifest_digest=str)
    assert door.grant not in repr(known.told("b"))
    assert KEY not in repr(known.present)
    assert known.told("nobody").doors == ()


def test_a_key_that_signs_nothing_costs_its_own_door_alone() -> None:
    known = Neighbourhoods()
    odd = instance("i-c", "c", State.READY, offer=replace(offers("tcp"), grant_key="odd"))
    known.update(1, seen([slot("a"), slot("b"), slot("c")], [ready(), asleep(), odd]))
    assert {d.slot for d in known.told("b").doors} == {"a"}


# ---------------------------------------------------------------- what a plan makes of it


def wake(*ways, offer=None, here="b", **slots):
    """The wake of i-b on slot b, which told of `ways` to slot a."""
    said = tuple(Reach("a", transport, verdict, why, 1.0) for transport, verdict, why in ways)
    spec = replace(SPEC, replicas=2, guardians=Guardians(0))
    source = instance("i-a", "a", State.READY, spec, offer=offer or offers("shm", "tcp"))
    views = (source, instance("i-b", "b", State.DORMANT, spec))
    there, own = slot("a", **slots), replace(slot("b", here, **slots), reach=said)
    snapshot = Snapshot(NOW, 1, 1, (ModelView(spec, Demand(0, 0.0, 0, None), "op-1"),), (there, own), views)
    found = plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new")
    return next(p for p in found.placements if p.instance == "i-b")


def test_what_was_not_tried_is_planned_as_before_and_said_to_be() -> None:
    found = wake(here="boot")
    assert kinds(found) == [RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.DISK]
    assert "i-a is ready on the same host (not probed)" in found.rungs[0].reason


def test_memory_that_was_not_reached_is_not_planned_whatever_the_host_is_called() -> None:
    found = wake(("shm", Verdict.NO, "no such socket"), here="boot")
    assert kinds(found) == [RungKind.PEER_TCP, RungKind.DISK]
    assert "peer_shm: i-a: b does not reach a by shm: no such socket" in found.reason


def test_what_was_reached_says_how() -> None:
    found = wake(("shm", Verdict.YES, "a descriptor was passed"), here="boot")
    assert found.rungs[0].kind is RungKind.PEER_SHM
    assert "(probed: a descriptor was passed)" in found.rungs[0].reason


def test_a_port_that_is_not_reached_leaves_the_disk_and_the_reason() -> None:
    found = wake(("tcp", Verdict.NO, "timed out"), here="other")
    assert kinds(found) == [RungKind.DISK]
    assert "peer_tcp: i-a: b does not reach a by tcp: timed out" in found.reason


def test_cards_that_do_not_reach_each_other_leave_tcp_and_that_stays_an_exception_with_its_reason() -> None:
    found = wake(
        ("rdma", Verdict.NO, "mlx5_0: no route"), here="other", transports={"rdma": ""},
        offer=offers("rdma", "tcp"),
    )  # fmt: skip
    assert kinds(found) == [RungKind.PEER_TCP, RungKind.DISK]
    assert found.rungs[0].instead_of == "peer_rdma: i-a: b does not reach a by rdma: mlx5_0: no route"


def test_who_does_not_reach_a_neighbour_is_not_dealt_anything_from_it() -> None:
    spec = replace(SPEC, replicas=4, guardians=Guardians(0))
    source = instance("i-a", "a", State.READY, spec, offer=replace(offers("tcp"), weight_bytes=1 << 30))
    sleepers = [instance(f"i-{n}", f"b{n}", State.DORMANT, spec, relay=relays("tcp")) for n in range(3)]
    slots = [slot("a", "source"), *(slot(f"b{n}", f"h{n}") for n in range(3))]
    slots[1] = replace(slots[1], reach=(Reach("b1", "tcp", Verdict.NO, "timed out", 1.0),))
    snapshot = Snapshot(
        NOW, 1, 1, (ModelView(spec, Demand(0, 0.0, 0, None), "op-1"),), tuple(slots), (source, *sleepers)
    )  # fmt: skip
    found = plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new")
    first = next(p for p in found.placements if p.instance == "i-0")
    assert first.rungs[0].deal.parts
    assert "i-1" not in {h.instance for h in first.rungs[0].helpers}
    parts = sorted(p for r in (first.rungs[0].source, *first.rungs[0].helpers) for p in r.parts)
    assert parts == list(range(first.rungs[0].deal.parts))
