"""Models that share devices, in any state: never two awake on one, nothing written is taken, and it settles."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from relight.controller.decide.replicas import decide
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core import invariants
from relight.core.records import (
    Demand,
    Desired,
    DeviceReport,
    Guardians,
    InstanceView,
    MemberView,
    Mode,
    ModelSpec,
    ModelView,
    SlotView,
    Snapshot,
)
from relight.core.states import State
from tests.property.test_decide_and_plan import NOW, ids, obey, report

DEVICE = DeviceReport("d0", "cpu", "d0", 1 << 30, 0)


@st.composite
def shared(draw):
    specs = [
        ModelSpec(
            "default", name, "/m", "r1", "stub", replicas=draw(st.sampled_from([0, 0, 1])), max_replicas=2,
            guardians=Guardians(draw(st.integers(0, 1)), 2, max_per_device=draw(st.integers(1, 3))),
            priority=draw(st.integers(0, 1)),
        )
        for name in "abc"[: draw(st.integers(2, 3))]
    ]  # fmt: skip
    demands = st.none() | st.builds(
        Demand,
        st.integers(0, 2),
        st.sampled_from([0.0, 1.0, 20.0]),
        st.integers(0, 1),
        st.sampled_from([NOW - 50, NOW]),
    )
    views = tuple(
        ModelView(s, draw(demands), activated_at=draw(st.none() | st.just(NOW - 60)), waits_since=NOW - 20)
        for s in specs
    )
    slots = tuple(
        SlotView(f"s{n}", True, "boot", False, {"stub": "1"}, (DEVICE,)) for n in range(draw(st.integers(1, 3)))
    )
    instances = []
    for slot in slots:
        living = draw(st.permutations(specs))[: draw(st.integers(0, len(specs)))]
        awake = draw(st.integers(0, len(living))) if living else 0
        for n, spec in enumerate(living):
            state = State.READY if n == awake else State.DORMANT
            name = f"i-{slot.slot}{spec.name}"
            told = dataclasses.replace(
                report(name, spec, 0, ("d0",), state), since=draw(st.sampled_from([NOW - 50, NOW]))
            )
            desired = Desired.READY if state is State.READY else Desired.DORMANT
            members = (MemberView(slot.slot, 0, ("d0",), told),)
            instances.append(InstanceView(name, spec.key, spec, members, desired, state, 2, "", Mode.NORMAL))
    return Snapshot(NOW, 1, 1, views, slots, tuple(instances), draw(st.sampled_from([True, True, False])))


def noted(snapshot, made):
    """What the store keeps in mind of the decisions, as controller/apply/changes.py writes it with the placements."""
    floors = {d.model: d.floor for d in made.decisions}
    models = [
        dataclasses.replace(m, activated_at=(m.activated_at or NOW) if floors.get(m.spec.key) else None)
        for m in snapshot.models
    ]
    return dataclasses.replace(snapshot, models=tuple(models)) if snapshot.synced else snapshot


def awake(snapshot, key):
    return [i for i in snapshot.instances if i.model == key and i.desired is Desired.READY and i.state is State.READY]


@settings(max_examples=400, deadline=None)
@given(shared())
def test_shared_devices_settle_with_one_awake_on_each_and_what_is_written_stays(snapshot):
    new_id = ids()
    rounds = []
    for _ in range(12):
        before = {m.spec.key: len(awake(snapshot, m.spec.key)) for m in snapshot.models}
        made = plan(snapshot, decide(snapshot), Predictions(), new_id)
        rounds.append(made.placements)
        snapshot = noted(obey(snapshot, made), made)
        assert not invariants.no_device_is_claimed_twice(snapshot)
        for model in snapshot.models:
            kept = min(before[model.spec.key], model.spec.replicas)
            assert len(awake(snapshot, model.spec.key)) >= kept, made.placements
        homes = [(i.model, m.slot) for i in snapshot.instances if not i.remembered for m in i.members]
        assert len(homes) == len(set(homes)), "two engines of one model on a device"
    assert rounds[-2:] == [(), ()]
