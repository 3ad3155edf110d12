"""Whatever the assignment and the local states: steps are legal, exclusive per device, and lead there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.agent.reconcile import INSTANT, Action, Kind, Local, admit, reconcile
from relight.core.errors import Fenced
from relight.core.records import Assignment, Desired, InstanceAssignment, ModelSpec
from relight.core.states import EDGES, State

DEVICES = ("cpu-0", "cpu-1", "cpu-2")
PARENTS = {"cpu-0": "card-0", "cpu-1": "card-0", "cpu-2": "card-1"}
SPEC = ModelSpec("default", "tiny", "/m", "r1", "stub")
NAMES = [f"i-{n}" for n in range(5)]
AFTER = {
    Kind.START: {Desired.READY: State.READY, Desired.DORMANT: State.DORMANT},
    Kind.WAKE: {Desired.READY: State.READY},
}

devices = st.lists(st.sampled_from(DEVICES), min_size=1, max_size=2, unique=True).map(tuple)
wanted = st.builds(
    lambda name, d, desired: InstanceAssignment(name, SPEC.key, SPEC, 0, 1, d, desired, cause="c"),
    st.sampled_from(NAMES), devices, st.sampled_from(Desired),
)  # fmt: skip
assignments = st.builds(
    lambda epoch, revision, found: Assignment("a", epoch, revision, tuple({w.instance: w for w in found}.values())),
    st.integers(1, 5), st.integers(1, 50), st.lists(wanted, max_size=5),
)  # fmt: skip
KIND_OF = {State.STARTING: Kind.START, State.WAKING: Kind.WAKE, State.SLEEPING: Kind.SLEEP, State.STOPPING: Kind.STOP}


@st.composite
def locals_(draw: st.DrawFn) -> list[Local]:
    found = []
    taken: set[str] = set()
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        state = draw(st.sampled_from(State))
        parents = tuple(sorted({PARENTS[d] for d in draw(devices)}))
        running = KIND_OF.get(state) if draw(st.booleans()) and not taken & set(parents) else None
        if running is not None:
            taken |= set(parents)
        found.append(Local(name, state, parents, draw(st.integers(1, 5)), draw(st.integers(1, 50)), running))
    return found


def _busy(local: list[Local]) -> set[str]:
    return {p for i in local if i.running is not None for p in i.parents}


@given(assignments, locals_())
def test_no_device_gets_two_transitions_and_no_busy_one_a_foreign_transition(a: Assignment, local: list[Local]) -> None:
    busy = _busy(local)
    here = {i.instance: i for i in local}
    owners = {w.instance: {PARENTS[d] for d in w.devices} for w in a.instances}
    used: list[str] = []
    for action in reconcile(a, local, busy, PARENTS, 0.0).actions:
        if action.kind in INSTANT:
            continue
        found = here.get(action.instance)
        mine = set(found.parents) if found else owners[action.instance]
        if found is None or found.running is None:
            assert not mine & busy
        used += mine
    assert len(used) == len(set(used))


@given(assignments, locals_())
def test_every_step_has_an_edge_of_the_table(a: Assignment, local: list[Local]) -> None:
    to = {Kind.DRAIN: State.DRAINING, Kind.UNDRAIN: State.READY, Kind.SLEEP: State.SLEEPING}
    to |= {Kind.WAKE: State.WAKING, Kind.START: State.STARTING, Kind.STOP: State.STOPPING}
    here = {i.instance: i for i in local}
    for action in reconcile(a, local, _busy(local), PARENTS, 0.0).actions:
        state = here[action.instance].state if action.instance in here else State.NONE
        if action.kind is Kind.FORGET:
            assert state is State.GONE
        elif (state, action.kind) != (State.NONE, Kind.STOP):
            assert state is to[action.kind] or (state, to[action.kind]) in EDGES


@given(assignments, locals_())
def test_the_same_question_has_the_same_answer(a: Assignment, local: list[Local]) -> None:
    assert reconcile(a, local, _busy(local), PARENTS, 1.0) == reconcile(a, local[::-1], _busy(local), PARENTS, 1.0)


@given(assignments, locals_())
def test_an_instance_named_by_nothing_newer_is_left_alone(a: Assignment, local: list[Local]) -> None:
    future = [replace(i, epoch=a.epoch, revision=a.revision) for i in local]
    named = {w.instance for w in a.instances}
    assert all(s.instance in named for s in reconcile(a, future, _busy(future), PARENTS, 0.0).actions)


def test_without_an_assignment_nothing_is_done() -> None:
    ready = Local("i-0", State.READY, ("card-0",), 1, 1)
    assert reconcile(None, [ready], (), PARENTS, 0.0).actions == ()


def _ideal(action: Action, local: dict[str, Local], a: Assignment) -> None:
    """What an agent without faults makes of a step."""
    want = {w.instance: w for w in a.instances}.get(action.instance)
    if action.kind is Kind.FORGET:
        del local[action.instance]
        return
    if action.instance not in local:
        assert want is not None
        parents = tuple(sorted({PARENTS[d] for d in want.devices}))
        local[action.instance] = Local(action.instance, State.NONE, parents, a.epoch, a.revision)
    desired = want.desired if want else Desired.GONE
    state = {
        Kind.DRAIN: State.DRAINING,
        Kind.UNDRAIN: State.READY,
        Kind.SLEEP: State.DORMANT,
        Kind.STOP: State.GONE,
        Kind.WAKE: State.READY,
        Kind.START: State.DORMANT if desired is Desired.DORMANT else State.READY,
    }[action.kind]
    local[action.instance] = replace(local[action.instance], state=state)


@given(assignments, locals_())
def test_without_faults_every_instance_gets_where_it_is_wanted_and_then_nothing_is_done(
    a: Assignment, found: list[Local]
) -> None:
    local = {i.instance: replace(i, running=None, epoch=0) for i in found}
    for _ in range(40):
        steps = reconcile(a, list(local.values()), (), PARENTS, 0.0)
        if not steps.actions:
            break
        for action in steps.actions:
            _ideal(action, local, a)
    assert reconcile(a, list(local.values()), (), PARENTS, 0.0).actions == ()
    good = {
        Desired.READY: {State.READY, State.FAILED, State.GONE},
        Desired.DORMANT: {State.DORMANT, State.FAILED, State.GONE},
        Desired.DRAINED: set(State) - {State.READY},
        Desired.GONE: {State.GONE},
    }
    named = {w.instance: w for w in a.instances}
    for name, instance in local.items():
        assert name in named
        assert instance.state in good[named[name].desired]


def test_what_frees_a_device_goes_before_what_needs_it() -> None:
    sleeper = InstanceAssignment("i-0", SPEC.key, SPEC, 0, 1, ("cpu-0",), Desired.DORMANT)
    waker = InstanceAssignment("i-1", SPEC.key, SPEC, 0, 1, ("cpu-1",), Desired.READY)
    local = [Local("i-0", State.DRAINING, ("card-0",), 1, 1), Local("i-1", State.DORMANT, ("card-0",), 1, 1)]
    steps = reconcile(Assignment("a", 1, 2, (waker, sleeper)), local, (), PARENTS, 0.0)
    assert [(s.kind, s.instance) for s in steps.actions] == [(Kind.SLEEP, "i-0")]
    assert [(w.kind, w.instance, w.reason) for w in steps.waiting] == [(Kind.WAKE, "i-1", "i-0 goes first")]


def test_a_step_that_failed_in_place_is_asked_for_again_later() -> None:
    want = InstanceAssignment("i-0", SPEC.key, SPEC, 0, 1, ("cpu-0",), Desired.DORMANT)
    local = [Local("i-0", State.DRAINING, ("card-0",), 1, 1, retry_at=5.0)]
    assert reconcile(Assignment("a", 1, 2, (want,)), local, (), PARENTS, 4.0).again_at == 5.0
    assert reconcile(Assignment("a", 1, 2, (want,)), local, (), PARENTS, 5.0).actions[0].kind is Kind.SLEEP


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_epochs_fence_and_revisions_decide(epoch: int, revision: int, seen: int, current: int) -> None:
    incoming, now = Assignment("a", epoch, revision), Assignment("a", seen, current)
    if epoch < seen:
        with pytest.raises(Fenced):
            admit(incoming, seen, now)
    else:
        assert admit(incoming, seen, now) is (epoch > seen or revision > current)
