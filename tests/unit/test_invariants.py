"""Invariants see what they are for, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relight.core.errors import InvariantViolated
from relight.core.invariants import enforce, no_device_is_claimed_twice, numbers_are_in_bounds, only_ready_is_routable
from relight.core.records import (
    Decision,
    Desired,
    InstanceReport,
    InstanceView,
    MemberView,
    Mode,
    ModelSpec,
    ModelView,
    RouteModel,
    RouteReplica,
    RouteTable,
    Snapshot,
)
from relight.core.states import State

SPEC = ModelSpec("default", "m", "/m", "r1", "stub", max_replicas=3)


def _instance(name: str, device: str, state: State = State.READY) -> InstanceView:
    report = InstanceReport(name, SPEC.key, 0, 1, (device,), state, 0.0, "", 7)
    member = MemberView("node-a", 0, (device,), report)
    return InstanceView(name, SPEC.key, SPEC, (member,), Desired.READY, state, 2, "", Mode.COLD)


def _snapshot(*instances: InstanceView) -> Snapshot:
    return Snapshot(0.0, 1, 1, (ModelView(SPEC, None),), (), instances)


def _table(instance: str, incarnation: int) -> RouteTable:
    replica = RouteReplica(instance, incarnation, "http://h", "m")
    return RouteTable(1, (RouteModel("default", "m", (), (replica,), 0, True, None, ""),))


def test_a_device_of_two_instances_is_a_breach_unless_one_is_gone() -> None:
    first, second = _instance("i-a", "d0"), _instance("i-b", "d0")
    assert no_device_is_claimed_twice(_snapshot(first, second)) == ["node-a/d0 is claimed by i-a and i-b"]
    assert no_device_is_claimed_twice(_snapshot(first, replace(second, state=State.GONE))) == []
    assert no_device_is_claimed_twice(_snapshot(first, _instance("i-b", "d1"))) == []


@pytest.mark.parametrize("state", [s for s in State if s is not State.READY])
def test_whatever_is_not_ready_must_not_be_routed(state: State) -> None:
    assert only_ready_is_routable(_snapshot(_instance("i-a", "d0", state)), _table("i-a", 7))


def test_a_ready_instance_is_routable_in_its_present_incarnation_alone() -> None:
    ready = _snapshot(_instance("i-a", "d0"))
    assert only_ready_is_routable(ready, _table("i-a", 7)) == []
    assert only_ready_is_routable(ready, _table("i-a", 6))
    assert only_ready_is_routable(ready, _table("i-b", 7))


@pytest.mark.parametrize(("replicas", "good"), [(0, True), (3, True), (4, False), (-1, False)])
def test_decided_numbers_stay_within_the_models_bounds(replicas: int, good: bool) -> None:
    assert (numbers_are_in_bounds(_snapshot(), [Decision(SPEC.key, replicas, 0, "")]) == []) is good


def test_enforcing_raises() -> None:
    with pytest.raises(InvariantViolated, match="rule: why"):
        enforce("rule", "why")
