"""The built-in autoscaler's rules over generated load: total, bounded, calm under constant load, still when blind."""

import dataclasses
import itertools
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relight.controller.autoscale.rules import OVERDUE_SECONDS, Action, Look, Memory, judge
from relight.core.records import Autoscaler, Demand, HeldLevel, ModelSpec, Scaling

NOW, WINDOW = 1_000_000.0, 60.0
SPEC = ModelSpec(
    "default", "m", "/m", "r", "stub", replicas=1, max_replicas=8, scaling=Scaling(8),
    autoscaler=Autoscaler(True, WINDOW),
)  # fmt: skip
ANY_NUMBER = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, NOW]) | st.floats()
NO_COUNT = st.sampled_from([-(10**18), -1, math.nan, math.inf, -math.inf])
ANY_COUNT = NO_COUNT | st.sampled_from([0, 1, 9, 10**18])
MEMORIES = st.builds(
    Memory,
    st.lists(st.builds(HeldLevel, st.integers(-2, 12), st.none() | ANY_NUMBER), max_size=4).map(tuple),
    st.none() | st.integers(-1, 12),
)
COMING = st.lists(st.none() | ANY_NUMBER, max_size=4).map(tuple)


def look(requests, now=NOW, ready=1, coming=(), **changes):
    demand = None if requests is None else Demand(requests, 0.0, 0, NOW)
    return Look(now, demand, ready, coming, **changes)


def with_replicas(number, **changes):
    return dataclasses.replace(SPEC, replicas=number, **changes)


@settings(max_examples=500, deadline=None)
@given(
    written=st.integers(-1, 12), low=st.integers(-1, 12), most=st.integers(-1, 9), share=st.integers(-1, 9),
    held=ANY_COUNT, flying=ANY_COUNT, missing=st.booleans(), now=ANY_NUMBER, ready=st.integers(-1, 9), coming=COMING,
    idle=st.booleans(), synced=st.booleans(), memory=MEMORIES, window=ANY_NUMBER,
)  # fmt: skip
def test_any_look_gives_a_number_within_bounds_and_a_reason(
    written, low, most, share, held, flying, missing, now, ready, coming, idle, synced, memory, window
):
    spec = with_replicas(
        written, min_replicas=low, max_replicas=most, scaling=Scaling(share), autoscaler=Autoscaler(True, window)
    )
    demand = None if missing else Demand(held, 0.0, flying, NOW)
    verdict = judge(spec, Look(now, demand, ready, coming, idle, synced), memory)
    assert min(max(0, low), max(0, most)) <= verdict.number <= max(0, most)
    assert verdict.target is None or 0 <= verdict.target <= verdict.number
    assert verdict.reason
    assert (verdict.number > written) == (verdict.action is Action.UP)
    assert (verdict.number < written) == (verdict.action is Action.DOWN)


@settings(max_examples=300, deadline=None)
@given(written=st.integers(0, 8), bad=NO_COUNT, where=st.booleans(), missing=st.booleans(), memory=MEMORIES,
       ready=st.integers(0, 9), coming=COMING, idle=st.booleans(), synced=st.booleans())  # fmt: skip
def test_what_is_missing_or_no_count_holds_the_number(
    written, bad, where, missing, memory, ready, coming, idle, synced
):
    demand = None if missing else Demand(bad if where else 3, 0.0, 3 if where else bad, NOW)
    verdict = judge(with_replicas(written), Look(NOW, demand, ready, coming, idle, synced), memory)
    assert (verdict.number, verdict.target, verdict.memory) == (written, None, Memory())
    blind = judge(with_replicas(written), look(0, ready=ready, coming=coming, synced=False), memory)
    assert blind.number == written


@settings(max_examples=300, deadline=None)
@given(
    start=st.integers(0, 8),
    requests=st.integers(0, 90),
    waits=st.lists(st.floats(0.0, 30.0), min_size=2, max_size=30),
)
def test_under_constant_load_the_number_moves_up_at_once_or_down_once_and_then_rests(start, requests, waits):
    number, memory, now, numbers = start, Memory(), NOW, []
    for wait in waits:
        verdict = judge(with_replicas(number), look(requests, now, ready=number), memory)
        number, memory, now = verdict.number, verdict.memory, now + wait
        numbers.append(number)
    needed = min(max(-(-requests // 8), 1 if start else 0), 8)
    assert numbers[0] == max(start, needed)
    changes = [b for a, b in itertools.pairwise(numbers) if a != b]
    assert changes in ([], [needed])
    if sum(waits[:-1]) > WINDOW:
        assert numbers[-1] == needed


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 40.0), st.integers(0, 90)), min_size=1, max_size=20))
def test_the_number_is_never_below_what_load_asked_for_within_the_window(steps):
    number, memory, now, history = 1, Memory(), NOW, []
    for wait, requests in steps:
        now += wait
        verdict = judge(with_replicas(number), look(requests, now, ready=number), memory)
        number, memory = verdict.number, verdict.memory
        history.append((now, min(max(1, -(-requests // 8)), 8)))
        assert number >= max(wanted for at, wanted in history if at > now - WINDOW)


@given(requests=st.integers(9, 60), ready=st.integers(0, 8), late=st.integers(0, 8), on_time=st.integers(0, 4))
def test_those_on_their_way_count_and_for_each_overdue_one_another_is_asked_for_once(requests, ready, late, on_time):
    needed = -(-requests // 8)
    assume(ready + late + on_time <= 8)
    coming = (*[-OVERDUE_SECONDS - 1.0] * late, *[3.0] * on_time)
    verdict = judge(with_replicas(needed), look(requests, ready=ready, coming=coming), Memory((), needed))
    assert verdict.number == min(needed + min(late, max(0, needed - ready)), 8)
    assert verdict.number <= 2 * needed


def test_the_last_replica_goes_by_idleness_alone():
    verdict = judge(with_replicas(1), look(0), Memory((), 1))
    assert (verdict.number, verdict.action) == (1, Action.STEADY)
    verdict = judge(with_replicas(1), look(0, idle=True), verdict.memory)
    assert (verdict.number, verdict.action) == (0, Action.DOWN)
    verdict = judge(with_replicas(0), look(0, idle=True, ready=0), verdict.memory)
    assert (verdict.number, verdict.action) == (0, Action.STEADY)
    verdict = judge(with_replicas(0), look(1, ready=0), verdict.memory)
    assert (verdict.number, verdict.action) == (1, Action.UP)


def test_a_number_that_somebody_else_wrote_stands_for_a_window():
    verdict = judge(with_replicas(1), look(0), Memory((), 1))
    verdict = judge(with_replicas(5), look(0, NOW + 1, ready=5), verdict.memory)
    assert (verdict.number, verdict.look_again_at) == (5, NOW + 1 + WINDOW)
    assert judge(with_replicas(5), look(0, NOW + 2 + WINDOW, ready=5), verdict.memory).number == 1
