"""Bursts over generated demand: bounded, held as long as promised, and untouched by what is missing."""

import dataclasses
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from relight.controller.decide.burst import burst
from relight.controller.decide.held import highest, hold, next_end
from relight.controller.decide.replicas import decide, next_change_at
from relight.core.records import Burst, Demand, HeldLevel, ModelSpec, ModelView, Scaling, Snapshot

NOW, HOLD = 1_000_000.0, 60.0
SPEC = ModelSpec(
    "default", "m", "/m", "r", "stub", replicas=1, max_replicas=8, scaling=Scaling(8), burst=Burst(6, HOLD)
)
ANY_NUMBER = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, NOW]) | st.floats()
ANY_COUNT = st.sampled_from([-(10**18), -1, 0, 1, 9, 10**18, math.nan, math.inf, -math.inf])
LEVELS = st.lists(st.builds(HeldLevel, st.integers(-2, 10), st.none() | ANY_NUMBER), max_size=5).map(tuple)


def demand(requests):
    return Demand(requests, 0.0, 0, NOW)


def view(requests, levels=(), spec=SPEC):
    return ModelView(spec, None if requests is None else demand(requests), burst=levels)


@settings(max_examples=500, deadline=None)
@given(
    held=ANY_COUNT, flying=ANY_COUNT, missing=st.booleans(), levels=LEVELS, now=ANY_NUMBER, written=st.integers(-1, 9),
    most=st.integers(-1, 9), low=st.integers(0, 9), top=st.integers(-1, 12), seconds=ANY_NUMBER,
    share=st.integers(-1, 9),
)  # fmt: skip
def test_a_decision_with_a_burst_is_total_bounded_and_never_below_the_number(
    held, flying, missing, levels, now, written, most, low, top, seconds, share
):
    spec = dataclasses.replace(
        SPEC, replicas=written, max_replicas=most, min_replicas=low, burst=Burst(top, seconds), scaling=Scaling(share)
    )
    seen = ModelView(spec, None if missing else Demand(held, 0.0, flying, NOW), burst=levels)
    snapshot = Snapshot(now, 1, 1, (seen,), (), ())
    (decision,) = decide(snapshot)
    assert min(max(0, written, low), max(0, most)) <= decision.replicas <= max(0, most)
    assert not decision.burst or decision.replicas <= top
    assert decision.reason
    at = next_change_at(snapshot)
    assert at is None or at > now


@given(levels=LEVELS, count=ANY_COUNT)
def test_missing_demand_neither_raises_nor_lowers_a_burst(levels, count):
    kept = burst(view(None, levels), 1, 9, NOW)
    before = max((min(k.replicas, 6) for k in levels), default=0)
    assert highest(kept) == (before if before > 1 else 0)
    unknown = dataclasses.replace(demand(0), in_flight=math.nan)
    assert burst(ModelView(SPEC, unknown, burst=levels), 1, 9, NOW) == kept


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 60)), min_size=1, max_size=20))
def test_each_level_is_held_exactly_as_long_as_promised_after_the_demand_for_it(steps):
    levels, now, history = (), NOW, []
    for after, requests in steps:
        now += after
        levels = burst(view(requests, levels), 1, 9, now)
        wanted = min(-(-requests // 8), 6)
        history.append((now, wanted))
        # A level is wanted until the next look that does not find it so.
        ends = [history[n + 1][0] if n + 1 < len(history) else math.inf for n in range(len(history))]
        expected = max((w for (_, w), end in zip(history, ends, strict=True) if end + HOLD > now), default=0)
        assert highest(levels) == (expected if expected > 1 else 0)


@example(levels=(HeldLevel(1, 0.0), HeldLevel(1, None)), wanted=0, now=0.5, seconds=1.0)
@given(levels=LEVELS, wanted=st.integers(0, 9), now=st.floats(0, 2e9), seconds=st.floats(0, 1e6))
def test_held_levels_are_few_sorted_and_stable(levels, wanted, now, seconds):
    first = hold(levels, wanted, now, seconds)
    assert [k.replicas for k in first] == sorted({k.replicas for k in first})
    assert hold(first, wanted, now, seconds) == first
    end = next_end(first, seconds)
    assert end is None or end > now


def test_a_burst_takes_guardians_alone_and_goes_no_further_than_they_reach():
    assert highest(burst(view(48), 1, 3, NOW)) == 3
    assert burst(view(48), 1, 1, NOW) == ()


def test_a_written_number_that_reaches_a_burst_makes_it_ordinary():
    levels = burst(view(32), 1, 9, NOW)
    assert highest(levels) == 4
    assert burst(view(32, levels), 4, 9, NOW + 1) == ()
