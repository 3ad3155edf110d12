"""The ring's own decisions at sizes that no one machine runs: who keeps what, and repair after kills and joins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from relight.agent.cache.placement import Holding, Membership, moves, plan_repair

SIZES = (3, 50)
REPLICAS = 2
STEPS = 12
"""Kills and joins in turn, each followed by a repair of every node."""


@dataclass(frozen=True, slots=True)
class Join:
    """A ring that becomes one of `nodes` nodes: placements that moved, of all."""

    nodes: int
    moved: int
    placements: int

    @property
    def fraction(self) -> float:
        return self.moved / self.placements

    @property
    def floor(self) -> float:
        return 1 / self.nodes

    @property
    def over_floor(self) -> float:
        return self.fraction / self.floor


class Remembering(Membership):
    """Membership whose answers are kept: fifty nodes ask it for the same keys in one process."""

    def __init__(self, revision: int, nodes: Mapping[str, str]) -> None:
        super().__init__(revision, nodes, REPLICAS)
        object.__setattr__(self, "keepers", cache(super().keepers))


def members(count: int) -> Membership:
    return Remembering(count, {f"node-{n}": "" for n in range(count)})


def joins(keys: list[str]) -> list[Join]:
    """One node more, from the smallest ring to the largest."""
    found = []
    before = members(SIZES[0])
    for count in range(SIZES[0] + 1, SIZES[1] + 1):
        after = members(count)
        said = moves(keys, before, after)
        found.append(Join(count, said.moved, said.placements))
        before = after
    return found


@dataclass(frozen=True, slots=True)
class Churn:
    """Nodes killed without a word and joined, at full size: how keys fared."""

    asked: int
    hits: int
    lost: int
    copied: int
    events: int
    """Joins and kills."""


def churn(keys: list[str], seed: int) -> Churn:
    """A ring of the largest size. Every key is asked for right after each event, and again after the repair."""
    rng = random.Random(seed)
    now = members(SIZES[1])
    held: dict[str, dict[str, Holding]] = {name: {} for name in now.nodes}
    for key in keys:
        for keeper in now.keepers(key):
            held[keeper][key * 2] = Holding(key, key * 2, 1, 1.0)
    asked = hits = copied = 0
    for step in range(STEPS):
        nodes = dict(now.nodes)
        if step % 2:
            held[f"new-{step}"] = {}
            nodes[f"new-{step}"] = ""
        else:
            gone = rng.choice(sorted(nodes))
            del nodes[gone], held[gone]
        now = Remembering(now.revision + 1, nodes)
        for again in (False, True):
            if again:
                copied += _repair(now, held)
            everywhere = set().union(*held.values())
            asked += len(keys)
            hits += sum(key * 2 in everywhere for key in keys)
    everywhere = set().union(*held.values())
    lost = sum(key * 2 not in everywhere for key in keys)
    return Churn(asked, hits, lost, copied, STEPS)


def _repair(now: Membership, held: dict[str, dict[str, Holding]]) -> int:
    """All nodes repair, each by what all others hold at that moment."""
    copied = 0
    for me in sorted(held):
        plan = plan_repair(me, now, held[me].values(), {n: h.values() for n, h in held.items() if n != me})
        for holding, _ in plan.fetch:
            held[me][holding.bundle] = holding
        for name in plan.drop:
            del held[me][name]
        copied += len(plan.fetch)
    return copied
