"""Which graphs come first, and what each weighs."""

from __future__ import annotations

import pytest

from relight.core.errors import InvalidInput
from relight.plugin.vllm.graphs.order import Graph, plan, stands_in, weigh

SIZES = (1, 2, 4, 8, 16, 32)


def decoding(tokens: int) -> Graph:
    return Graph("FULL", tokens, True, f"{tokens:05d}")


def mixed(tokens: int) -> Graph:
    return Graph("PIECEWISE", tokens, False, f"{tokens:05d}")


WHOLE = [*map(decoding, SIZES[:5]), *map(mixed, SIZES)]


def test_the_largest_of_each_mode_and_the_smallest_decoding_graph_come_first() -> None:
    assert plan(WHOLE, {}).first == (decoding(16), decoding(1), mixed(32))


def test_an_engine_without_decoding_graphs_begins_with_its_largest_and_its_smallest() -> None:
    assert plan(map(mixed, SIZES), {}).first == (mixed(32), mixed(1))


def test_one_graph_is_captured_once_and_none_not_at_all() -> None:
    assert plan([mixed(8)], {}).first == (mixed(8),)
    assert plan([], {1: 1.0}) == plan([], {})
    assert not plan([], {}).graphs


def test_the_fleets_usual_steps_come_next_and_decoding_before_the_rest() -> None:
    rest = [g for piece in plan(WHOLE, {3: 10.0, 7: 20.0}).pieces for g in piece]
    assert rest[:4] == [decoding(8), mixed(8), decoding(4), mixed(4)]
    assert rest[4:] == [decoding(2), mixed(16), mixed(2), mixed(1)]


def test_without_a_histogram_decoding_goes_first_and_the_larger_before_the_smaller() -> None:
    rest = [g for piece in plan(WHOLE, {}).pieces for g in piece]
    assert rest == [*map(decoding, (8, 4, 2)), *map(mixed, (16, 8, 4, 2, 1))]


def test_a_step_weighs_on_the_smallest_graph_that_holds_it_and_on_none_when_it_is_too_large() -> None:
    weights = weigh(WHOLE, {5: 1.0, 8: 2.0, 9: 4.0, 33: 100.0})
    assert {g.tokens: w for g, w in weights.items() if w and g.decode} == {8: 3.0, 16: 4.0}
    assert sum(weights.values()) == 14.0


def test_graphs_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(InvalidInput, match="equal names"):
        plan([mixed(8), Graph("PIECEWISE", 9, False, mixed(8).name)], {})


def test_a_step_is_padded_to_twice_its_tokens_at_most() -> None:
    assert [n for n in range(1, 10) if stands_in(8, n)] == [4, 5, 6, 7, 8]
