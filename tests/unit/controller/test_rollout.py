"""Replacing replicas: a new revision, other arguments, closing slots; by plans that an ideal agent obeys."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.controller.decide.replicas import decide
from relight.controller.plan.fleet import first_difference, runtime_digest, same_runtime
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core.records import Demand, Desired, Failure, Guardians, Mode, ModelView, Snapshot, Strategy
from relight.core.states import State
from support.planning import SPEC, instance, slot

NOW = 1_000.0
OLD = dataclasses.replace(SPEC, replicas=2, guardians=Guardians(0, 2), max_replicas=9)
NEW = dataclasses.replace(OLD, revision="r2", uri="/m2")
STATES = {
    Desired.READY: State.READY,
    Desired.DORMANT: State.DORMANT,
    Desired.DRAINED: State.DRAINING,
}


class World:
    """Slots of one device each; every step plans and does at once what was planned."""

    def __init__(self, spec, slots=3, broken=()):
        self.spec, self.broken = spec, set(broken)
        self.slots = {f"s{n}": slot(f"s{n}") for n in range(slots)}
        self.views = {}
        self.ids = itertools.count()
        self.history = []

    def close(self, name, reason="node drain"):
        self.slots[name] = dataclasses.replace(self.slots[name], closing=reason)

    def step(self):
        model = ModelView(self.spec, Demand(0, 0.0, 0, NOW), changed_at=NOW)
        snapshot = Snapshot(NOW, 1, 1, (model,), tuple(self.slots.values()), tuple(self.views.values()))
        made = plan(snapshot, decide(snapshot), Predictions(), lambda p: f"{p}-{next(self.ids):03d}")
        for placement in made.placements:
            self._do(placement)
        self.history.append({name: (v.spec.revision, v.state) for name, v in self.views.items()})
        return made

    def settle(self):
        for _ in range(40):
            if not self.step().placements:
                return self
        raise AssertionError("it never came to rest")

    def _do(self, placement):
        old = self.views.get(placement.instance)
        if placement.desired is Desired.GONE:
            del self.views[placement.instance]
            return
        spec = self.spec if placement.rungs or old is None else old.spec
        state = STATES[placement.desired]
        failure = None
        if state is State.READY and spec.revision in self.broken:
            state, failure = State.FAILED, Failure("the canary differs", None)
        made = instance(placement.instance, placement.slots[0], state, spec)
        self.views[placement.instance] = dataclasses.replace(
            made,
            desired=placement.desired,
            failure=failure,
            failed_at=NOW,
            drained=placement.desired is Desired.DRAINED,
        )
        if failure:
            memory = dataclasses.replace(made, instance=f"{placement.instance}-memory", members=(), remembered=True)
            memory = dataclasses.replace(memory, state=State.GONE, desired=Desired.READY, failure=failure)
            self.views[memory.instance] = dataclasses.replace(memory, failed_at=NOW)

    def serving(self, revision=None):
        return sorted(
            v.members[0].slot
            for v in self.views.values()
            if v.state is State.READY and v.desired is Desired.READY and revision in (None, v.spec.revision)
        )

    def fewest(self, since):
        return min(sum(state is State.READY for _, state in seen.values()) for seen in self.history[since:])


def test_a_new_revision_replaces_one_replica_after_another_and_never_serves_with_fewer():
    world = World(OLD).settle()
    world.spec, since = NEW, len(world.history)
    world.settle()
    assert (len(world.serving("r2")), world.serving("r1")) == (2, [])
    assert world.fewest(since) >= 2


def test_the_first_replica_of_a_revision_goes_alone_however_much_surge_is_allowed():
    world = World(dataclasses.replace(OLD, replicas=3, strategy=Strategy(max_surge=3)), slots=6).settle()
    world.spec = dataclasses.replace(world.spec, revision="r2")
    world.step()
    assert len(world.serving("r2")) == 1
    assert len(world.serving("r1")) == 3
    world.settle()
    assert (len(world.serving("r2")), world.serving("r1")) == (3, [])


def test_a_revision_that_cannot_be_proven_takes_nobody_down_and_the_way_back_is_free():
    world = World(OLD, slots=3, broken=["r2"]).settle()
    world.spec = NEW
    world.settle()
    assert len(world.serving("r1")) == 2
    world.spec = OLD
    world.settle()
    assert len(world.serving("r1")) == 2
    assert all(v.spec.revision == "r1" for v in world.views.values() if not v.remembered)


@pytest.mark.parametrize("change", [{"args": ("--x",)}, {"env": {"A": "1"}}, {"served_names": ("other",)}])
def test_replicas_started_otherwise_than_the_specification_says_are_replaced(change):
    world = World(OLD).settle()
    world.spec = dataclasses.replace(OLD, **change)
    world.settle()
    specs = [v.spec for v in world.views.values() if v.desired is Desired.READY]
    assert [{name: getattr(s, name) for name in change} for s in specs] == [change, change]


def test_a_number_that_changes_replaces_nobody():
    world = World(OLD).settle()
    before = set(world.views)
    world.spec = dataclasses.replace(OLD, replicas=3, max_replicas=5)
    world.settle()
    assert before <= set(world.views)


def test_a_guardian_takes_the_new_revision_and_a_replaced_replica_becomes_one():
    spec = dataclasses.replace(OLD, replicas=1, guardians=Guardians(1, 2))
    world = World(spec, slots=2).settle()
    (guardian,) = (n for n, v in world.views.items() if v.desired is Desired.DORMANT)
    world.spec = dataclasses.replace(spec, revision="r2")
    world.settle()
    assert world.views[guardian].state is State.READY
    assert world.views[guardian].spec.revision == "r2"
    assert sorted(v.state for v in world.views.values()) == [State.DORMANT, State.READY]


def test_without_room_nothing_happens_unless_fewer_may_serve():
    world = World(OLD, slots=2).settle()
    world.spec = NEW
    assert "nothing fits" in " ".join(world.step().unplaced)
    assert len(world.serving("r1")) == 2
    world.spec = dataclasses.replace(NEW, strategy=Strategy(max_surge=1, max_unavailable=1))
    since = len(world.history)
    world.settle()
    assert len(world.serving("r2")) == 2
    assert world.fewest(since) >= 1


def test_a_paused_rollout_replaces_nobody_but_what_stands_on_a_closing_slot():
    world = World(OLD, slots=3).settle()
    world.spec = dataclasses.replace(NEW, strategy=Strategy(paused=True))
    world.settle()
    assert len(world.serving("r1")) == 2
    world.close(world.serving()[0])
    world.settle()
    assert (len(world.serving("r1")), len(world.serving("r2"))) == (1, 1)


def test_replicas_leave_a_closing_slot_once_others_serve_elsewhere():
    world = World(OLD, slots=4).settle()
    for name in world.serving():
        world.close(name)
    since = len(world.history)
    world.step()
    assert len(world.serving()) == 4, "both replacements start at once"
    world.settle()
    assert not [s for s in world.serving() if world.slots[s].closing]
    assert world.fewest(since) >= 2
    assert not [v for v in world.views.values() if world.slots[v.members[0].slot].closing]


def test_a_guardian_on_a_closing_slot_is_not_woken_and_goes():
    spec = dataclasses.replace(OLD, replicas=1, guardians=Guardians(1, 2))
    world = World(spec, slots=3).settle()
    (guardian,) = (v for v in world.views.values() if v.desired is Desired.DORMANT)
    world.close(guardian.members[0].slot)
    world.spec = dataclasses.replace(spec, replicas=2)
    world.settle()
    assert guardian.instance not in world.views


def test_a_replica_that_stays_nowhere_else_serves_on_its_closing_slot_to_the_end():
    world = World(dataclasses.replace(OLD, replicas=1), slots=1).settle()
    world.close("s0")
    assert "closing (node drain)" in " ".join(world.step().unplaced)
    assert world.serving() == ["s0"]


def test_models_are_placed_on_slots_of_their_own_pool_alone():
    world = World(dataclasses.replace(OLD, pool="team/gold"), slots=3)
    world.slots["s1"] = dataclasses.replace(world.slots["s1"], pool="team/gold")
    world.slots["s2"] = dataclasses.replace(world.slots["s2"], pool="team/gold", allowed=("team/other",))
    world.settle()
    assert world.serving() == ["s1"]
    told = " ".join(world.step().unplaced)
    assert "1 of no pool" in told
    assert "1 of a pool that does not allow it" in told


@settings(max_examples=200, deadline=None)
@given(
    replicas=st.integers(0, 4),
    guardians=st.integers(0, 2),
    slots=st.integers(1, 7),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 2),
    changes=st.lists(st.sampled_from(["r2", "r1", "close", "scale"]), max_size=4),
    mode=st.sampled_from([Mode.AUTO, Mode.GUARDIAN, Mode.COLD]),
)
def test_every_rollout_comes_to_rest_and_never_goes_below_what_may_be_missing(
    replicas, guardians, slots, surge, unavailable, changes, mode
):
    strategy = Strategy(surge, unavailable)
    spec = dataclasses.replace(OLD, replicas=replicas, guardians=Guardians(guardians, 2), strategy=strategy, mode=mode)
    world = World(spec, slots=slots).settle()
    for change in changes:
        before, since = len(world.serving()), len(world.history)
        if change == "close":
            world.close(f"s{slots - 1}")
        elif change == "scale":
            world.spec = dataclasses.replace(world.spec, replicas=(world.spec.replicas + 1) % 5)
        else:
            world.spec = dataclasses.replace(world.spec, revision=change)
        world.settle()
        floor = min(before, world.spec.replicas) - strategy.max_unavailable
        assert world.fewest(since) >= floor
    if (
        mode is Mode.COLD
        and (surge or unavailable)
        and len([s for s in world.slots.values() if not s.closing]) > replicas + 1 + guardians
    ):
        assert {v.spec.revision for v in world.views.values() if v.state is State.READY} <= {world.spec.revision}


@pytest.mark.parametrize(("engine", "replaced"), [("sglang", True), ("vllm", False)])
def test_engines_that_are_told_their_level_at_the_start_are_replaced_when_it_changes(engine, replaced):
    one = dataclasses.replace(OLD, engine=engine, guardians=Guardians(0, 1))
    two = dataclasses.replace(one, guardians=Guardians(0, 2))
    assert same_runtime(one, one)
    assert same_runtime(one, two) is not replaced
    assert (runtime_digest(one) == runtime_digest(two)) is not replaced
    assert first_difference(two, one) == ("guardians.level: 2 here, 1 there" if replaced else "")
