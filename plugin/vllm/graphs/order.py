"""Which graphs an engine captures before it answers, and in which order it captures the rest. Pure.

The first set is the least with which the rest may come in any order:

- the largest graph of each mode. What is captured first sizes the memory pool that all graphs share: after the largest,
  the others fit into what is there, so their order costs no memory and what was reserved for the whole set is enough.
  vLLM's V2 runner also sizes the buffer of a full graph's output by the first one that it captures.
- the smallest graph of a decoding step: the first request, alone on a fresh replica, gets all tokens but one by it.

The rest follows what the fleet runs: a graph weighs as much as the steps that it would serve. Among equals decoding
goes first, since a request has one prefill and many decoding steps, and then the larger, which stands in for others.

The order depends on the set and the histogram alone, never on the order in which they came: ranks that capture in
different orders wait for each other forever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relight.core.errors import InvalidInput

PIECE = 4
"""Graphs a piece. A request that comes meanwhile waits for one piece; each piece has a cost of its own, which ranks pay
together (they exchange the addresses of the buffers that their graphs use)."""
STRETCH = 2
"""A graph stands in for a missing one up to this many times the tokens; beyond that, padding costs more than launching
the kernels one by one does."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph of an engine's full set. `name` is unique within its mode and equal on all ranks."""

    mode: str
    tokens: int
    decode: bool
    """Serves steps of decoding alone."""
    name: str


@dataclass(frozen=True, slots=True)
class Plan:
    first: tuple[Graph, ...]
    pieces: tuple[tuple[Graph, ...], ...]

    @property
    def graphs(self) -> frozenset[Graph]:
        return frozenset(self.first).union(*self.pieces)


def plan(graphs: Iterable[Graph], histogram: Mapping[int, float], piece: int = PIECE) -> Plan:
    """Every graph once: the first set, then pieces. `histogram` weighs the fleet's steps by their tokens.

    Raises InvalidInput when two graphs cannot be told apart.
    """
    whole = sorted(graphs, key=lambda g: (g.mode, -g.tokens, g.name))
    if len({(g.mode, g.name) for g in whole}) != len(whole):
        raise InvalidInput("graphs with equal names")
    first = _first(whole)
    weights = weigh(whole, histogram)
    rest = [g for g in whole if g not in first]
    rest.sort(key=lambda g: (-weights[g], not g.decode, -g.tokens, g.mode, g.name))
    return Plan(first, tuple(tuple(rest[at : at + piece]) for at in range(0, len(rest), piece)))


def _first(whole: list[Graph]) -> tuple[Graph, ...]:
    """In the order of `whole`."""
    if not whole:
        return ()
    largest = {mode: next(g for g in whole if g.mode == mode) for mode in {g.mode for g in whole}}
    decoding = [g for g in whole if g.decode] or whole
    smallest = min(decoding, key=lambda g: (g.tokens, g.mode, g.name))
    wanted = {*largest.values(), smallest}
    return tuple(g for g in whole if g in wanted)


def weigh(graphs: Iterable[Graph], histogram: Mapping[int, float]) -> dict[Graph, float]:
    """The weight of the steps that each graph would serve: those up to its tokens and above the next smaller one's.

    Decoding and other graphs are weighed apart: the histogram does not say which of the two a step was.
    """
    weights = dict.fromkeys(graphs, 0.0)
    for kind in {(g.mode, g.decode) for g in weights}:
        members = [g for g in weights if (g.mode, g.decode) == kind]
        sizes = sorted({g.tokens for g in members})
        served = dict.fromkeys(sizes, 0.0)
        for tokens in sorted(histogram):
            at = bisect_left(sizes, tokens)
            if at < len(sizes):
                served[sizes[at]] += histogram[tokens]
        weights.update({g: served[g.tokens] for g in members})
    return weights


def stands_in(graph_tokens: int, step_tokens: int) -> bool:
    """Whether a step may be padded to a graph that is not its own."""
    return step_tokens <= graph_tokens <= STRETCH * step_tokens
