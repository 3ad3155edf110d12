"""Histograms of what engines run: few buckets, older work fades, reports merge, starts are told the most common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.core import shapes
from relight.core.records import Shapes

_weights = st.dictionaries(st.sampled_from(shapes.STEPS), st.floats(0.01, 1e9), max_size=20)
_shapes = st.builds(Shapes, st.floats(0, 1e6), _weights, _weights)


@pytest.mark.parametrize(("size", "end"), [(1, 1), (3, 4), (9, 16), (512, 512), (513, 1024), (1 << 30, 1 << 20)])
def test_a_size_is_counted_under_the_next_larger_one_that_engines_know(size: int, end: int) -> None:
    assert shapes.STEPS[shapes.bucket(shapes.STEPS, size)] == end


def test_what_ran_an_hour_ago_counts_half() -> None:
    before = Shapes(0.0, {1: 8.0}, {4: 2.0})
    assert shapes.faded(before, shapes.HALF_LIFE) == Shapes(shapes.HALF_LIFE, {1: 4.0}, {4: 1.0})


def test_only_what_an_engine_counted_since_the_last_reading_is_added() -> None:
    first, second = Shapes(1.0, {1: 10}, {4: 2}), Shapes(1.0, {1: 15, 8: 1}, {4: 2, 16: 1})
    known = shapes.grown(None, None, first)
    assert shapes.grown(known, first, second) == Shapes(1.0, {1: 15, 8: 1}, {4: 2, 16: 1})
    assert shapes.grown(known, second, second) == Shapes(1.0, {1: 10}, {4: 2})


def test_an_engine_that_counted_less_than_before_is_another_process() -> None:
    old, new = Shapes(1.0, {1: 10}, {4: 2}), Shapes(1.0, {1: 3}, {4: 1})
    assert shapes.grown(old, old, new) == Shapes(1.0, {1: 13}, {4: 3})


def test_what_is_stored_stands_until_engines_that_run_have_seen_more() -> None:
    stored = Shapes(0.0, {1: 100.0}, {4: 100.0})
    few, many = Shapes(1.0, {8: 1.0}, {16: 1.0}), Shapes(1.0, {8: 200.0}, {16: 200.0})
    assert shapes.prevailing(stored, few) is stored
    assert shapes.prevailing(stored, many) is many
    assert shapes.prevailing(None, few) is few
    later = Shapes(shapes.HALF_LIFE * 10, {8: 1.0}, {16: 1.0})
    assert shapes.prevailing(stored, later) is later


def test_a_start_is_told_nothing_of_a_handful_of_requests() -> None:
    assert shapes.told(None) is None
    assert shapes.told(Shapes(1.0, {1: 900.0}, {4: shapes.LEAST_PROMPTS - 1.0})) is None
    assert shapes.told(Shapes(1.0, {1: 900.0}, {4: float(shapes.LEAST_PROMPTS)})) is not None


def test_warm_up_prompts_are_the_most_common_ones_and_repeat_when_there_are_few() -> None:
    known = Shapes(1.0, {}, {4: 1.0, 64: 9.0, 256: 5.0})
    assert shapes.prompts(known, 2) == (64, 256)
    assert shapes.prompts(Shapes(1.0, {}, {64: 9.0}), 3) == (64, 64, 64)
    assert shapes.prompts(known, 0) == shapes.prompts(None, 2) == shapes.prompts(Shapes(1.0), 2) == ()


@given(st.lists(_shapes, max_size=5))
def test_merging_does_not_depend_on_the_order_of_reports_and_keeps_the_sizes_few(parts: list[Shapes]) -> None:
    whole, turned = shapes.merged(parts), shapes.merged(parts[::-1])
    assert whole.steps == pytest.approx(turned.steps)
    assert len(whole.steps) <= len(shapes.STEPS)
    told = shapes.told(whole)
    assert told is None or (len(told.steps) <= shapes.MOST_STEPS and len(told.prompts) <= shapes.MOST_PROMPTS)
