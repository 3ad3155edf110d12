"""Who reads which chunk from whom, in which order, over which path, and how long it will take. Pure: no I/O.

An assignment says: "receiver j takes chunk i of shard r from holder h, once h has it". A star, a pipelined chain and a
swarm are the same list; a failure is the same question again for what is unfinished (holders and receivers say what
they
have). Times are the fluid bound (no resource carries more than its capacity) and one chunk's time for each further hop.
The bound and the scheme that reaches it, in which each receiver relays its share of the source's upload to all others,
are Kumar and Ross, "Peer-Assisted File Distribution: The Minimum Distribution Time" (2006).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from relight.core.errors import InvalidInput

HUGE = 2 << 20
"""Bytes of a huge page."""
ABOUT_AS_FAST = 1.01
"""Times the least time within which a shape counts as equally fast."""
SWARM_MOST = 32
"""Receivers up to which everybody may read from everybody: beyond, connections and their threads cost more than the
hops of a chain."""
LOCAL_PATHS = frozenset({"memory", "shm", "nvlink"})
"""Paths inside one host: a chunk crosses the network once per host, and spreads from there."""


def shares(length: int, streams: int) -> list[tuple[int, int]]:
    """[0, length) in `streams` runs of near-equal size, cut at multiples of 2 MiB; a run may be empty."""
    pages = -(-length // HUGE)
    cuts = [min(pages * n // streams * HUGE, length) for n in range(streams)] + [length]
    return list(pairwise(cuts))


@dataclass(frozen=True, slots=True)
class HolderEnd:
    """Who can give chunks of `shard` now: all of them (`has` None), or those in `has`."""

    name: str
    shard: int
    has: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class ReceiverEnd:
    """Who needs chunks of `shard`: all (`missing` None), or those in `missing`. What it has it passes on."""

    name: str
    shard: int
    host: str
    missing: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """How `receiver` can read from `holder`: which path, how fast at best, through which resources, and why so."""

    holder: str
    receiver: str
    path: str
    bytes_per_second: float
    uses: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is made for.

    `sizes`: bytes of each chunk, by shard. `capacities`: bytes per second of each resource that links use: a network
    card in one direction, a source's share (its cap), a host's memory. What is already taken is not in them.
    """

    sizes: Mapping[int, Sequence[int]]
    holders: Sequence[HolderEnd]
    receivers: Sequence[ReceiverEnd]
    links: Sequence[Link]
    capacities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ChunkAssignment:
    """`receiver` takes `chunk` of `shard` from `holder` over `path`; expected `at` seconds after the start."""

    receiver: str
    shard: int
    chunk: int
    holder: str
    path: str
    at: float


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The assignments in the order in which they are to be asked for; `seconds` until the last one, `shape` and why.

    `reasons` says for each (receiver, holder) why that path.
    """

    assignments: tuple[ChunkAssignment, ...]
    seconds: float
    shape: str
    reason: str
    reasons: Mapping[tuple[str, str], str]

    def queues(self, receiver: str) -> dict[str, tuple[int, ...]]:
        """By holder, the chunks that `receiver` takes from it, in order."""
        found: dict[str, list[int]] = defaultdict(list)
        for a in self.assignments:
            if a.receiver == receiver:
                found[a.holder].append(a.chunk)
        return {holder: tuple(chunks) for holder, chunks in found.items()}


def plan(question: Question) -> TransferPlan:
    """The fastest of star, swarm and chain for every shard together; of those that are about as fast the first: a chunk
    that passes through fewer hands is held up by fewer.

    Raises InvalidInput when a receiver needs a chunk that nobody has, or that no link brings to it.
    """
    _check(question)
    most = max(Counter(r.shard for r in question.receivers).values(), default=0)
    shapes = ("star", "swarm", "chain") if most <= SWARM_MOST else ("star", "chain")
    drafts = [_Draft(question, shape).make() for shape in shapes]
    best = min(d.seconds for d in drafts)
    chosen = next(d for d in drafts if d.seconds <= best * ABOUT_AS_FAST)
    others = ", ".join(f"{d.shape} {d.seconds:.3f} s" for d in drafts if d is not chosen)
    return chosen.finished(f"{chosen.shape} takes {chosen.seconds:.3f} s ({others}); {chosen.limit}")


def floor_seconds(
    count: float, receivers: int, up: Sequence[float], receiver_up: float, receiver_down: float
) -> float:  # fmt: skip
    """The least time in which `count` bytes can reach `receivers`: `up` in bytes per second by full holder."""
    if not receivers:
        return 0.0
    return max(count / receiver_down, count / sum(up), receivers * count / (sum(up) + receivers * receiver_up))


def _check(question: Question) -> None:
    for link in question.links:
        if not link.bytes_per_second > 0:
            raise InvalidInput(f"the link {link.holder} to {link.receiver} carries {link.bytes_per_second} bytes/s")
        for resource in link.uses:
            if not question.capacities.get(resource, 0.0) > 0:
                raise InvalidInput(f"the link {link.holder} to {link.receiver} uses {resource}, which has no capacity")
    names = [h.name for h in question.holders] + [r.name for r in question.receivers]
    if len(set(names)) != len(names):
        raise InvalidInput(f"each end is named once, got {sorted(n for n in names if names.count(n) > 1)[0]} twice")


@dataclass(slots=True)
class _Edge:
    receiver: ReceiverEnd
    chunk: int
    link: Link


@dataclass(slots=True)
class _Draft:
    """One shape, dealt out chunk by chunk onto whatever is least loaded."""

    question: Question
    shape: str
    load: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds for which each resource is busy."""
    edges: list[_Edge] = field(default_factory=list)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    passing: dict[tuple[str, tuple[str, ...]], list[tuple[str, float]]] = field(default_factory=dict)
    """As `_passing` found it: the same for nearly all chunks."""
    latency: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.load.values(), default=0.0) + self.latency

    @property
    def limit(self) -> str:
        if not self.load:
            return "nothing is missing"
        # Of equally loaded ones a shared resource says more than a link that is its only user.
        named = max(self.load, key=lambda r: (round(self.load[r], 9), r in self.question.capacities))
        return f"limited by {named}"

    def make(self) -> _Draft:
        for link in self.question.links:
            known = self.links.get((link.holder, link.receiver))
            if known is None or link.bytes_per_second > known.bytes_per_second:
                self.links[link.holder, link.receiver] = link
        for shard, sizes in sorted(self.question.sizes.items()):
            holders = [h for h in self.question.holders if h.shard == shard]
            receivers = [r for r in self.question.receivers if r.shard == shard]
            missing = {r.name: frozenset(range(len(sizes)) if r.missing is None else r.missing) for r in receivers}
            for chunk, size in enumerate(sizes):
                needy = [r for r in receivers if chunk in missing[r.name]]
                if not needy:
                    continue
                having = [h.name for h in holders if h.has is None or chunk in h.has]
                having += [r.name for r in receivers if chunk not in missing[r.name]]
                self._deal(shard, chunk, size, having, needy)
        return self

    # ------------------------------------------------------------------ one chunk

    def _deal(self, shard: int, chunk: int, size: int, having: list[str], needy: list[ReceiverEnd]) -> None:
        reached = dict.fromkeys(having, 0)
        near = {r.name: local for r in needy if (local := [h for h in having if self._is_local(h, r.name)])}
        for receiver in needy:
            if receiver.name in near:
                # It crosses no network to a host that has it already.
                self._take(shard, chunk, size, receiver, near[receiver.name], reached)
        leaders, followers = self._leaders(chunk, [r for r in needy if r.name not in near])
        if not leaders:
            return
        if self.shape == "star":
            order = [(r, list(having)) for r in leaders]
        elif self.shape == "chain":
            order = [(r, [leaders[n - 1].name] if n else list(having)) for n, r in enumerate(leaders)]
        else:
            first = self._relay(having, leaders, size)
            order = [(first, list(having))] + [(r, [first.name]) for r in leaders if r is not first]
        for receiver, candidates in order:
            self._take(shard, chunk, size, receiver, candidates, reached)
        for receiver in followers:
            local = [n for n in reached if self._is_local(n, receiver.name)]
            self._take(shard, chunk, size, receiver, local or list(reached), reached)

    def _leaders(self, chunk: int, needy: list[ReceiverEnd]) -> tuple[list[ReceiverEnd], list[ReceiverEnd]]:
        """By host in turn the one that takes the chunk from elsewhere, and those that have it from a neighbour."""
        hosts: dict[str, list[ReceiverEnd]] = defaultdict(list)
        for receiver in needy:
            hosts[receiver.host].append(receiver)
        leaders: list[ReceiverEnd] = []
        followers: list[ReceiverEnd] = []
        for group in hosts.values():
            lead = group[chunk % len(group)]
            leaders.append(lead)
            for other in group:
                if other is not lead:
                    (followers if self._is_local(lead.name, other.name) else leaders).append(other)
        return leaders, followers

    def _is_local(self, holder: str, receiver: str) -> bool:
        link = self.links.get((holder, receiver))
        return link is not None and link.path in LOCAL_PATHS

    def _relay(self, having: list[str], leaders: list[ReceiverEnd], size: int) -> ReceiverEnd:
        """The receiver that passes the chunk on at the least cost in what is loaded most."""

        names = tuple(r.name for r in leaders)

        def price(receiver: ReceiverEnd) -> tuple[float, float]:
            first = min((self._price(h, receiver.name, size) for h in having), default=float("inf"))
            busy = [self.load[r] + size * each for r, each in self._passing(receiver.name, names)]
            # Where the source is what limits, any relay would do: the least busy one, so that all take part.
            return max([first, *busy]), sum(busy)

        return min(leaders, key=price)

    def _passing(self, relay: str, names: tuple[str, ...]) -> list[tuple[str, float]]:
        """The resources that `relay` uses when it passes something on to all others of `names`: seconds for a byte."""
        known = self.passing.get((relay, names))
        if known is None:
            passed: dict[str, float] = defaultdict(float)
            for name in names:
                if name != relay and (link := self.links.get((relay, name))) is not None:
                    for resource in link.uses:
                        passed[resource] += 1 / self.question.capacities[resource]
            known = self.passing[relay, names] = list(passed.items())
        return known

    def _price(self, holder: str, receiver: str, size: int) -> float:
        """Seconds until the most loaded resource on the way is free again; infinite without a link."""
        link = self.links.get((holder, receiver))
        if link is None:
            return float("inf")
        lane = self.load[_lane(link)] + size / link.bytes_per_second
        return max([lane, *(self.load[r] + size / self.question.capacities[r] for r in link.uses)])

    def _take(
        self, shard: int, chunk: int, size: int, receiver: ReceiverEnd, candidates: Iterable[str],
        reached: dict[str, int],
    ) -> None:  # fmt: skip
        able = [c for c in candidates if (c, receiver.name) in self.links]
        if not able:
            able = [c for c in reached if (c, receiver.name) in self.links]
        if not able:
            raise InvalidInput(f"no link brings chunk {chunk} of shard {shard} to {receiver.name}")
        holder = min(able, key=lambda h: (self._price(h, receiver.name, size), h))
        link = self.links[holder, receiver.name]
        for resource in link.uses:
            self.load[resource] += size / self.question.capacities[resource]
        self.load[_lane(link)] += size / link.bytes_per_second
        depth = reached[holder] + 1
        reached[receiver.name] = depth
        self.latency = max(self.latency, (depth - 1) * size / link.bytes_per_second)
        self.edges.append(_Edge(receiver, chunk, link))

    def finished(self, reason: str) -> TransferPlan:
        """The draft as a plan, with a time for each assignment."""
        total: dict[str, int] = defaultdict(int)
        for edge in self.edges:
            total[edge.receiver.name] += 1
        seen: dict[str, int] = defaultdict(int)
        made = []
        for edge in self.edges:
            name = edge.receiver.name
            seen[name] += 1
            at = self.seconds * seen[name] / total[name]
            made.append(ChunkAssignment(name, edge.receiver.shard, edge.chunk, edge.link.holder, edge.link.path, at))
        used = {(e.receiver.name, e.link.holder): e.link.reason for e in self.edges}
        return TransferPlan(tuple(made), self.seconds, self.shape, reason, used)


def _lane(link: Link) -> str:
    """A link is a resource of its own: it carries no more than its own rate."""
    return f"{link.holder} to {link.receiver}"
