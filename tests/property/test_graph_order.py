"""Properties of the order in which graphs are captured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relight.plugin.vllm.graphs.order import Graph, plan, weigh

TOKENS = st.integers(1, 64)
GRAPHS = st.sets(st.tuples(st.sampled_from(["FULL", "PIECEWISE"]), TOKENS, st.booleans()), max_size=40).map(
    lambda found: [Graph(mode, tokens, decode, f"{tokens:05d}/{decode:d}") for mode, tokens, decode in sorted(found)]
)
HISTOGRAMS = st.dictionaries(TOKENS, st.floats(0, 1e6), max_size=20)


@given(GRAPHS, HISTOGRAMS, st.integers(1, 9))
def test_every_graph_is_captured_exactly_once(graphs: list[Graph], histogram: dict[int, float], size: int) -> None:
    made = plan(graphs, histogram, size)
    captured = [*made.first, *(g for piece in made.pieces for g in piece)]
    assert len(captured) == len(set(captured))
    assert made.graphs == set(captured) == set(graphs)
    assert all(1 <= len(piece) <= size for piece in made.pieces)


@given(GRAPHS, HISTOGRAMS, st.randoms(use_true_random=False))
def test_ranks_that_list_their_graphs_differently_capture_alike(graphs, histogram, random) -> None:
    shuffled, pairs = list(graphs), list(histogram.items())
    random.shuffle(shuffled)
    random.shuffle(pairs)
    assert plan(shuffled, dict(pairs)) == plan(graphs, histogram)


@given(GRAPHS, HISTOGRAMS)
def test_what_comes_first_is_small_and_holds_the_largest_of_each_mode(graphs, histogram) -> None:
    made = plan(graphs, histogram)
    modes = {g.mode for g in graphs}
    assert len(made.first) <= len(modes) + 1
    for mode in modes:
        assert max(g.tokens for g in graphs if g.mode == mode) == max(g.tokens for g in made.first if g.mode == mode)


@given(GRAPHS, HISTOGRAMS)
def test_nothing_in_the_rest_comes_after_a_lighter_one(graphs, histogram) -> None:
    weights = weigh(graphs, histogram)
    rest = [weights[g] for piece in plan(graphs, histogram).pieces for g in piece]
    assert rest == sorted(rest, reverse=True)
