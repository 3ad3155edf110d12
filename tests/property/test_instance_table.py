"""A state machine over one member: whatever is tried, it moves along the table's edges only, and its story says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relight.agent.journal import InstanceRecord
from relight.agent.member import Member
from relight.core.clock import VirtualClock
from relight.core.errors import InvariantViolated
from relight.core.records import Desired, InstanceAssignment, ModelSpec
from relight.core.states import EDGES, State, group_state

SPEC = ModelSpec("default", "m", "/m", "r1", "stub")
ASSIGNMENT = InstanceAssignment("i-a", SPEC.key, SPEC, 0, 1, ("d0",), Desired.READY)
TERMINAL = {State.GONE}


class InstanceTable(RuleBasedStateMachine):
    """The real Member with an in-memory journal."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.kept: list[InstanceRecord] = []
        self.told = 0
        self.member = self._new()
        self.path = [State.NONE]

    def _new(self) -> Member:
        return Member(ASSIGNMENT, Path("/d"), Path("/l"), self.clock, self.kept.append, self._tell, 1, 1, 0.0)

    def _tell(self, urgent: bool) -> None:
        self.told += urgent

    @rule(state=st.sampled_from(list(State)), cause=st.text(max_size=5))
    def move(self, state: State, cause: str) -> None:
        before = self.member.record()
        self.clock.advance(1.0)
        if (self.member.state, state) in EDGES:
            self.member.move(state, cause)
            self.path.append(state)
            assert self.member.cause == cause
        else:
            with pytest.raises(InvariantViolated, match=f"no edge {before.state} -> {state}"):
                self.member.move(state, cause)
            assert self.member.record() == before

    @rule(reason=st.text(min_size=1, max_size=5), again=st.none() | st.floats(0, 100))
    def fail(self, reason: str, again: float | None) -> None:
        able = self.member.state not in (State.FAILED, State.GONE)
        self.member.fail(reason, again)
        if able:
            self.path.append(State.FAILED)
            assert self.member.failure is not None
            assert (self.member.failure.reason, self.member.failure.retry_after) == (reason, again)

    @precondition(lambda self: self.kept)
    @rule()
    def restart(self) -> None:
        """The agent dies: what the journal kept is what the next one knows."""
        self.member = self._new()
        self.member.restore(self.kept[-1])

    @invariant()
    def every_step_is_an_edge_and_was_journalled_before_anyone_was_told(self) -> None:
        assert self.member.state is self.path[-1]
        assert all((s.before, s.after) in EDGES for s in self.member.story)
        assert len(self.kept) >= self.told
        if self.kept:
            assert self.kept[-1].state is self.member.state

    @invariant()
    def only_a_ready_member_tells_where_it_answers(self) -> None:
        report = self.member.report()
        assert report.state is self.member.state
        if self.member.state is not State.READY:
            assert report.endpoint is None
            assert report.source is None


TestInstanceTable = InstanceTable.TestCase


@given(st.lists(st.sampled_from(list(State)), min_size=1, max_size=5), st.integers(1, 6))
def test_a_group_is_ready_only_when_every_member_is(states: list[State], expected: int) -> None:
    ready = group_state(states, max(expected, len(states))) is State.READY
    assert ready == (all(s is State.READY for s in states) and expected <= len(states))


@given(st.lists(st.sampled_from(list(State)), min_size=1, max_size=5))
def test_a_group_with_a_failed_member_is_failed_in_any_order(states: list[State]) -> None:
    assert group_state(states, len(states)) is group_state(states[::-1], len(states))
    if State.FAILED in states:
        assert group_state(states, len(states)) is State.FAILED


def test_every_state_but_the_terminal_one_can_fail_and_none_leaves_the_terminal_one() -> None:
    for state in State:
        if state not in TERMINAL | {State.FAILED}:
            assert (state, State.FAILED) in EDGES
    assert not [edge for edge in EDGES if edge[0] in TERMINAL]


def test_nothing_becomes_ready_without_a_proof_step_before_it() -> None:
    assert {a for a, b in EDGES if b is State.READY} == {State.STARTING, State.WAKING, State.DRAINING}
