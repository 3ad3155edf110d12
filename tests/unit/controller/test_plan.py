"""What a plan chooses, and the reasons that it gives."""

import dataclasses

import pytest

from relight.controller.decide.replicas import decide
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core.records import (
    Capability,
    Demand,
    Desired,
    DeviceHolder,
    Failure,
    Guardians,
    Mode,
    ModelSpec,
    ModelView,
    RungKind,
    ScaleToZero,
    Snapshot,
    Verdict,
)
from relight.core.states import State
from support.planning import DEVICE, SPEC, instance, kinds, offers, slot


def made(instances, slots, spec=SPEC, rungs=(), **changes):
    view = ModelView(spec, Demand(0, 0.0, 0, None), "op-1", rungs)
    snapshot = Snapshot(100.0, 1, 1, (view,), tuple(slots), tuple(instances), **changes)
    return plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new")


def wake_of(found, name="i-b"):
    return next(p for p in found.placements if p.instance == name)


def test_a_guardian_on_the_sources_host_wakes_by_shared_memory_then_tcp_then_disk():
    found = made([instance("i-a", "a", State.READY), instance("i-b", "b", State.DORMANT)], [slot("a"), slot("b")])
    wake = wake_of(found)
    assert (wake.desired, wake.mode) == (Desired.READY, Mode.GUARDIAN)
    assert kinds(wake) == [RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.DISK]
    assert [p.mode for p in wake.prices] == [Mode.GUARDIAN, Mode.LAZY, Mode.NORMAL, Mode.COLD]
    assert all(r.reason for r in wake.rungs)


def test_another_host_or_a_forced_slot_leaves_tcp():
    ready, asleep = instance("i-a", "a", State.READY), instance("i-b", "b", State.DORMANT)
    for slots in ([slot("a"), slot("b", "other")], [slot("a"), slot("b", force_tcp=True)]):
        assert kinds(wake_of(made([ready, asleep], slots))) == [RungKind.PEER_TCP, RungKind.DISK]


def rungs_between(here, there, offer):
    """The rungs of a wake on another host than its source's, with what the two slots say of RDMA."""
    ready, asleep = instance("i-a", "a", State.READY, offer=offer), instance("i-b", "b", State.DORMANT)
    slots = [slot("a", transports=there), slot("b", "other", transports=here)]
    return wake_of(made([ready, asleep], slots))


def test_between_hosts_with_cards_rdma_comes_before_tcp():
    wake = rungs_between({"rdma": ""}, {"rdma": ""}, offers("shm", "rdma", "tcp"))
    assert kinds(wake) == [RungKind.PEER_RDMA, RungKind.PEER_TCP, RungKind.DISK]
    assert wake.rungs[0].source.address == "rdma:h:1"
    assert not wake.rungs[1].instead_of.partition(": ")[2]


@pytest.mark.parametrize(
    ("here", "there", "offer", "why"),
    [
        ({"rdma": "mlx5_0: port 1 is DOWN"}, {"rdma": ""}, offers("rdma", "tcp"), "b: mlx5_0: port 1 is DOWN"),
        ({"rdma": ""}, {"rdma": "memlock"}, offers("rdma", "tcp"), "a: memlock"),
        (
            {"rdma": ""},
            {"rdma": ""},
            offers("tcp", rdma="mlx5_0: it failed"),
            "i-a: mlx5_0: it failed",
        ),
    ],
)
def test_tcp_where_rdma_was_expected_says_what_stands_in_the_way(here, there, offer, why):
    wake = rungs_between(here, there, offer)
    assert kinds(wake) == [RungKind.PEER_TCP, RungKind.DISK]
    assert wake.rungs[0].instead_of == f"peer_rdma: {why}"
    assert f"peer_rdma: {why}" in wake.reason


def test_nobody_expects_rdma_of_a_slot_without_a_card():
    wake = rungs_between({"rdma": ""}, {}, offers("tcp"))
    assert kinds(wake) == [RungKind.PEER_TCP, RungKind.DISK]
    assert not wake.rungs[0].instead_of


def between_devices(offer, there="boot"):
    """The rungs of a wake beside a ready replica whose weights lie on a device."""
    ready, asleep = instance("i-a", "a", State.READY, offer=offer), instance("i-b", "b", State.DORMANT)
    return wake_of(made([ready, asleep], [slot("a"), slot("b", there)]))


DEVICES = {"shm": "its weights lie in memory of device 0"}


def test_a_replica_on_a_device_of_the_same_host_is_read_by_nvlink_and_elsewhere_through_the_host():
    wake = between_devices(offers("nvlink", "tcp", **DEVICES))
    assert kinds(wake) == [RungKind.PEER_NVLINK, RungKind.PEER_TCP, RungKind.DISK]
    assert "on the same host" in wake.rungs[0].reason
    assert not wake.rungs[1].instead_of.partition(": ")[2]
    assert kinds(between_devices(offers("nvlink", "tcp", **DEVICES), "other")) == [RungKind.PEER_TCP, RungKind.DISK]


def test_an_engine_that_loads_the_weights_of_its_start_itself_is_promised_no_peer():
    knows = Capability("stub", "await_weights", Verdict.NO, "it loads them by itself")
    here = dataclasses.replace(slot("b"), capabilities=(knows,))
    snapshot = made([instance("i-a", "a", State.READY, offer=offers("nvlink", "tcp"))], [slot("a"), here])
    (start,) = [p for p in snapshot.placements if p.instance != "i-a" and p.desired is Desired.READY]
    assert kinds(start) == [RungKind.DISK]


def test_tcp_within_a_host_where_nvlink_was_expected_says_what_stands_in_the_way():
    wake = between_devices(offers("tcp", nvlink="made without handles", **DEVICES))
    assert kinds(wake) == [RungKind.PEER_TCP, RungKind.DISK]
    assert wake.rungs[0].instead_of == "peer_nvlink: i-a: made without handles"
    assert "peer_shm: i-a: its weights lie in memory of device 0" in wake.reason


def test_cards_of_both_ends_read_a_device_by_nixl_before_verbs():
    served = offers("nvlink", "nixl", "rdma", "tcp", **DEVICES)
    wake = rungs_between({"rdma": ""}, {"rdma": ""}, served)
    assert kinds(wake) == [RungKind.PEER_NIXL, RungKind.PEER_RDMA, RungKind.PEER_TCP, RungKind.DISK]
    assert kinds(rungs_between({}, {"rdma": ""}, served)) == [RungKind.PEER_TCP, RungKind.DISK]


def test_nobody_expects_of_an_engine_without_devices_what_only_devices_have():
    wake = wake_of(
        made([instance("i-a", "a", State.READY), instance("i-b", "b", State.DORMANT)], [slot("a"), slot("b")])
    )
    assert "nvlink" not in wake.reason
    assert "nixl" not in wake.reason


def test_level_one_adds_the_host_copy_and_the_operation_may_allow_it_alone():
    ready, asleep = instance("i-a", "a", State.READY), instance("i-b", "b", State.DORMANT, level=1)
    slots = [slot("a"), slot("b", "other")]
    assert kinds(wake_of(made([ready, asleep], slots)))[-2:] == [RungKind.HOST_COPY, RungKind.DISK]
    only = made([ready, asleep], slots, rungs=(RungKind.HOST_COPY,))
    assert kinds(wake_of(only)) == [RungKind.HOST_COPY]


def test_a_layout_that_differs_is_refused_with_the_field_named():
    ready, asleep = instance("i-a", "a", State.READY), instance("i-b", "b", State.DORMANT, layout="fp8")
    wake = wake_of(made([ready, asleep], [slot("a"), slot("b")]))
    assert kinds(wake) == [RungKind.DISK]
    assert "layout.dtype: 'fp8' here, 'bf16' there" in wake.reason


def test_content_of_another_revision_is_refused_with_the_field_named():
    old = instance("i-a", "a", State.READY, spec=dataclasses.replace(SPEC, revision="r0"))
    wake = wake_of(made([old, instance("i-b", "b", State.DORMANT)], [slot("a"), slot("b")]))
    assert kinds(wake) == [RungKind.DISK]
    assert "content.revision: 'r1' is asked for, 'r0' there" in wake.reason


def test_two_wakes_read_from_two_sources():
    spec = dataclasses.replace(SPEC, replicas=4)
    instances = [instance(f"i-{n}", n, State.READY, spec) for n in "ab"]
    instances += [instance(f"i-{n}", n, State.DORMANT, spec) for n in "cd"]
    found = made(instances, [slot(n) for n in "abcd"], spec)
    first = {p.rungs[0].source.instance for p in found.placements if p.desired is Desired.READY}
    assert first == {"i-a", "i-b"}


def test_sources_of_one_kind_help_each_other_on_one_rung():
    spec = dataclasses.replace(SPEC, replicas=3)
    instances = [instance(f"i-{n}", n, State.READY, spec) for n in "ab"] + [instance("i-c", "c", State.DORMANT, spec)]
    wake = wake_of(made(instances, [slot(n) for n in "abc"], spec), "i-c")
    peer = next(r for r in wake.rungs if r.source)
    assert [peer.source.instance, *(h.instance for h in peer.helpers)] == ["i-a", "i-b"]
    assert peer.reason.endswith("; i-b helps")
    assert len({r.kind for r in wake.rungs}) == len(wake.rungs)


def test_a_missing_guardian_never_takes_the_device_that_a_replica_waits_for():
    spec = dataclasses.replace(SPEC, replicas=2, devices_per_member=2, guardians=Guardians(0, 2))
    other = ModelSpec("default", "z", "/z", "r1", "stub", guardians=Guardians(1, 2))
    views = tuple(ModelView(s, None) for s in (spec, other))
    snapshot = Snapshot(100.0, 1, 1, views, (slot("a"), slot("b")), ())
    found = plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new")
    assert found.placements == ()
    assert any("replicas need the devices first" in text for text in found.unplaced)


def test_an_unhealthy_device_and_one_held_by_a_stranger_are_not_free():
    broken = dataclasses.replace(DEVICE, healthy=False, reason="ecc")
    held = dataclasses.replace(DEVICE, holders=(DeviceHolder(7, "python", 1 << 20),))
    found = made([], [slot("a", devices=(broken,)), slot("b", devices=(held,))])
    assert found.placements == ()
    assert "2 without enough free devices" in found.unplaced[0]


def test_a_failure_without_a_retry_time_is_not_replaced_and_says_so():
    failed = instance(
        "i-a", "a", State.FAILED, desired=Desired.READY, failure=Failure("no memory", None), failed_at=99.0
    )
    found = made([failed], [slot("a"), slot("b")], dataclasses.replace(SPEC, replicas=1, guardians=Guardians()))
    assert [(p.instance, p.desired) for p in found.placements] == [("i-a", Desired.GONE)]
    assert "not tried again by itself" in found.unplaced[0]


def test_a_failed_wake_stays_a_guardian_and_another_is_tried_when_it_may_be():
    failed = instance(
        "i-b", "b", State.DORMANT, desired=Desired.READY, failure=Failure("tensor x differs", 5.0), failed_at=99.0
    )
    ready = instance("i-a", "a", State.READY)
    first = made([ready, failed], [slot("a"), slot("b")])
    assert [(p.instance, p.desired) for p in first.placements] == [("i-b", Desired.DORMANT)]
    memory = dataclasses.replace(failed, members=(), remembered=True, failed_at=90.0)
    again = made([ready, instance("i-b", "b", State.DORMANT), memory], [slot("a"), slot("b")])
    assert wake_of(again).desired is Desired.READY


def test_scaling_to_zero_keeps_a_guardian_where_the_policy_says_so():
    spec = dataclasses.replace(SPEC, replicas=0, guardians=Guardians(), scale_to_zero=ScaleToZero(None))
    drained = instance("i-a", "a", State.READY, spec, desired=Desired.DRAINED, drained=True)
    (placement,) = made([drained], [slot("a")], spec).placements
    assert placement.desired is Desired.DORMANT


def test_at_zero_the_one_that_the_next_request_wakes_stays_beside_the_standing_guardians():
    spec = dataclasses.replace(SPEC, replicas=0, guardians=Guardians(1), scale_to_zero=ScaleToZero(None))
    drained = instance("i-a", "a", State.READY, spec, desired=Desired.DRAINED, drained=True)
    standing = instance("i-b", "b", State.DORMANT, spec, desired=Desired.DORMANT)
    (placement,) = made([drained, standing], [slot("a"), slot("b")], spec).placements
    assert (placement.instance, placement.desired) == ("i-a", Desired.DORMANT)


def test_nobody_is_woken_in_the_stead_of_a_replica_that_was_not_heard_of_yet():
    asleep = instance("i-b", "b", State.DORMANT)
    unheard = dataclasses.replace(slot("a"), clear=False, presumed=SPEC.key)
    found = made([asleep], [unheard, slot("b")], synced=False)
    assert [p.instance for p in found.placements] == ["i-b"], "of two replicas one may be there"
    spec = dataclasses.replace(SPEC, replicas=1)
    found = made([asleep], [unheard, slot("b")], spec=spec, synced=False)
    assert found.placements == ()
    assert found.unplaced == ("default/m: a was not heard of yet, and is said to have a replica",)
    another = dataclasses.replace(unheard, presumed="default/other")
    found = made([asleep], [another, slot("b")], spec=spec, synced=False)
    assert [(p.instance, p.desired) for p in found.placements] == [("i-b", Desired.READY)]


def test_the_least_busy_replica_goes_first():
    spec = dataclasses.replace(SPEC, replicas=1, guardians=Guardians())
    busy = instance("i-a", "a", State.READY, spec, in_flight=3)
    calm = instance("i-b", "b", State.READY, spec, in_flight=1)
    (placement,) = made([busy, calm], [slot("a"), slot("b")], spec).placements
    assert (placement.instance, placement.desired) == ("i-b", Desired.DRAINED)
