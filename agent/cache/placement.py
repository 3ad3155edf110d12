"""Which cache nodes keep a key, and what has to move when the nodes change. Pure: no I/O.

Rendezvous hashing: each node has a score for each key, and the `replicas` best keep it. When a node joins, it takes
just the keys on which it scores well, and each of them pushes out one other replica: a share of 1/n of all placements
moves, which is the least that leaves n nodes evenly filled. When one leaves, its keys alone move.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

DEFAULT_REPLICAS = 2


def score(node: str, key: str) -> int:
    """64 bits, uniform and independent per pair."""
    return int.from_bytes(hashlib.blake2b(f"{node}\0{key}".encode(), digest_size=8).digest(), "big")


def ranked(key: str, nodes: Iterable[str]) -> list[str]:
    """All nodes, the one that most deserves the key first."""
    return sorted(nodes, key=lambda node: (-score(node, key), node))


@dataclass(frozen=True, slots=True)
class Membership:
    """The cache nodes, name -> address (`tcp:host:port` or `tls:host:port`), as of a revision; how many keep each
    key."""

    revision: int
    nodes: Mapping[str, str]
    replicas: int = DEFAULT_REPLICAS

    def keepers(self, key: str) -> list[str]:
        """The nodes that shall keep the key's bundle, best first; fewer than `replicas` when there are fewer nodes."""
        return heapq.nsmallest(self.replicas, self.nodes, key=lambda node: (-score(node, key), node))


@dataclass(frozen=True, slots=True)
class Moves:
    """How many replica placements are at nodes that did not have them before, of how many."""

    moved: int
    placements: int


def moves(keys: Collection[str], before: Membership, after: Membership) -> Moves:
    """What a change of nodes moves."""
    moved = placements = 0
    for key in keys:
        keepers = after.keepers(key)
        placements += len(keepers)
        moved += len(set(keepers).difference(before.keepers(key)))
    return Moves(moved, placements)


@dataclass(frozen=True, slots=True)
class Holding:
    """One bundle on a node: its key's digest, its own name, its bytes, and when it was last used (time of day)."""

    key: str
    bundle: str
    bytes: int
    last_use: float


@dataclass(frozen=True, slots=True)
class Repair:
    """What one node has to do: bundles to give up for another one of the same key, once that one is seen to be good;
    then bundles to fetch, each with the nodes that have it, most recently used first; bundles to give up, because
    every node that shall keep them does."""

    superseded: tuple[tuple[str, Holding, tuple[str, ...]], ...]
    fetch: tuple[tuple[Holding, tuple[str, ...]], ...]
    drop: tuple[str, ...]


def plan_repair(
    me: str, members: Membership, mine: Iterable[Holding], others: Mapping[str, Iterable[Holding]]
) -> Repair:
    """What `me` does about what it holds and what the `others` said that they hold.

    `others` has the nodes that answered. A node that did not answer may hold anything and confirms nothing, so what it
    shall keep is given up by nobody.
    """
    own = {h.bundle: h for h in mine}
    holders: dict[str, set[str]] = {}
    seen: dict[str, Holding] = {}
    # Two bundles of one key come from two compiles that did not know of each other. Both are good; everybody keeps the
    # one whose name comes first.
    first = {h.key: h.bundle for h in own.values()}
    for node, holdings in others.items():
        for holding in holdings:
            holders.setdefault(holding.bundle, set()).add(node)
            first[holding.key] = min(first.get(holding.key, holding.bundle), holding.bundle)
            known = seen.get(holding.bundle)
            if known is None or holding.last_use > known.last_use:
                seen[holding.bundle] = holding
    superseded = tuple(
        (name, seen[first[holding.key]], tuple(sorted(holders[first[holding.key]])))
        for name, holding in own.items()
        if first[holding.key] != name
    )
    fetch = [
        (holding, tuple(sorted(holders[name])))
        for name, holding in seen.items()
        if name not in own and first[holding.key] == name and me in members.keepers(holding.key)
    ]
    fetch.sort(key=lambda item: -item[0].last_use)
    drop = []
    for name, holding in own.items():
        keepers = members.keepers(holding.key)
        if me not in keepers and keepers and holders.get(name, set()).issuperset(keepers):
            drop.append(name)
    return Repair(superseded, tuple(fetch), tuple(drop))


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a bundle comes in, and what goes for it, least recently used first."""

    taken: bool
    evicted: tuple[str, ...]
    reason: str


def admit(held: Iterable[Holding], need: int, quota: int, last_use: float) -> Admission:
    """Room for `need` bytes under `quota`: what was used less recently than the newcomer (`last_use`) goes for it.

    So a repair never brings back what a full node has just given up for something newer.
    """
    if need > quota:
        return Admission(False, (), f"{need} bytes do not fit into a quota of {quota}")
    there = list(held)
    used = sum(h.bytes for h in there)
    evicted = []
    if used + need > quota:
        there.sort(key=lambda h: (h.last_use, h.bundle))
    for holding in there:
        if used + need <= quota:
            break
        if holding.last_use >= last_use:
            return Admission(False, (), f"{need} bytes would need room of bundles that were used more recently")
        used -= holding.bytes
        evicted.append(holding.bundle)
    return Admission(True, tuple(evicted), f"{used + need} of {quota} bytes used")
