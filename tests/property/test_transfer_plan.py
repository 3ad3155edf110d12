"""Properties of the transfer plan, for any fleet: complete, free of cycles, within every capacity, and it ends."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.core.errors import InvalidInput
from relight.transfer.plan import (
    HolderEnd,
    Link,
    Question,
    ReceiverEnd,
    TransferPlan,
    floor_seconds,
    plan,
)

SIZE = 1 << 20


def fleet(
    sources: int, receivers: int, chunks: int, *, up: float = 1e9, down: float = 1e9, share: float = 1.0,
    per_host: int = 1, shards: int = 1,
) -> Question:  # fmt: skip
    """Sources and receivers with a card each way per host; receivers of one host reach each other by shm."""
    holders = [HolderEnd(f"s{n}/{r}", r) for n in range(sources) for r in range(shards)]
    ends = [ReceiverEnd(f"r{n}/{r}", r, f"h{n // per_host}") for n in range(receivers) for r in range(shards)]
    host = {e.name: e.host for e in ends} | {h.name: h.name.split("/")[0] for h in holders}
    shard = {e.name: e.shard for e in (*ends, *holders)}
    capacities = {f"{h}:{way}": (up if way == "up" else down) for h in host.values() for way in ("up", "down")}
    capacities |= {f"share:{h.name}": up * share for h in holders}
    links = []
    for giver in host:
        for taker in (e.name for e in ends):
            if giver == taker or shard[giver] != shard[taker]:
                continue
            if host[giver] == host[taker]:
                links.append(Link(giver, taker, "shm", 1e10, (), "same host"))
                continue
            uses = (f"{host[giver]}:up", f"{host[taker]}:down") + ((f"share:{giver}",) if giver[0] == "s" else ())
            links.append(Link(giver, taker, "tcp", min(up, down), uses, "no faster path"))
    return Question({r: [SIZE] * chunks for r in range(shards)}, holders, ends, links, capacities)


fleets = st.builds(
    fleet, st.integers(1, 4), st.integers(1, 12), st.integers(1, 20), up=st.sampled_from([1e8, 1e9]),
    share=st.sampled_from([0.25, 0.5, 1.0]), per_host=st.integers(1, 4), shards=st.integers(1, 2),
)  # fmt: skip


def arrivals(question: Question, made: TransferPlan) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for a in made.assignments:
        found[a.receiver].append((a.shard, a.chunk))
    return found


@settings(deadline=None)
@given(fleets)
def test_every_chunk_arrives_exactly_once_at_every_receiver(question: Question) -> None:
    made = plan(question)
    found = arrivals(question, made)
    for receiver in question.receivers:
        wanted = [(receiver.shard, n) for n in range(len(question.sizes[receiver.shard]))]
        assert sorted(found[receiver.name]) == wanted
        assert sorted(c for q in made.queues(receiver.name).values() for c in q) == [c for _, c in wanted]


@settings(deadline=None)
@given(fleets)
def test_no_chunk_waits_for_itself(question: Question) -> None:
    has = {(h.name, h.shard, n) for h in question.holders for n in range(len(question.sizes[h.shard]))}
    # Assignments come in an order in which each holder has the chunk before it gives it: so there is no cycle.
    for a in plan(question).assignments:
        assert (a.holder, a.shard, a.chunk) in has
        has.add((a.receiver, a.shard, a.chunk))


@settings(deadline=None)
@given(fleets)
def test_nothing_carries_more_than_its_capacity_in_the_time_that_the_plan_states(question: Question) -> None:
    made = plan(question)
    links = {(n.holder, n.receiver): n for n in question.links}
    carried: dict[str, float] = defaultdict(float)
    for a in made.assignments:
        for resource in links[a.holder, a.receiver].uses:
            carried[resource] += SIZE
    for resource, count in carried.items():
        assert count <= question.capacities[resource] * made.seconds * 1.000001
    assert all(a.at <= made.seconds * 1.000001 for a in made.assignments)


@settings(deadline=None)
@given(fleets, st.randoms(use_true_random=False))
def test_after_any_loss_what_is_unfinished_is_planned_anew_until_nothing_is_missing(question: Question, random) -> None:
    has: dict[str, set[int]] = {r.name: set() for r in question.receivers}
    for _ in range(40):
        made = plan(question)
        if not made.assignments:
            break
        # A random part of the plan comes about, in order; then one end is lost, a full source of each shard excepted.
        for a in made.assignments[: random.randint(-(-len(made.assignments) // 2), len(made.assignments))]:
            has[a.receiver].add(a.chunk)
        lost = random.choice([e.name for e in (*question.holders, *question.receivers)])
        if lost.startswith("s0"):
            lost = ""
        question = replace(
            question,
            holders=[h for h in question.holders if h.name != lost],
            receivers=[
                replace(r, missing=tuple(sorted(set(range(len(question.sizes[r.shard]))) - has[r.name])))
                for r in question.receivers
                if r.name != lost
            ],
        )
    assert not plan(question).assignments


@pytest.mark.parametrize("receivers", [1, 2, 4, 8, 32])
def test_many_receivers_take_little_longer_than_one(receivers: int) -> None:
    one, many = plan(fleet(1, 1, 128)), plan(fleet(1, receivers, 128))
    assert many.seconds <= one.seconds * (1 + 0.04 * math.log2(2 * receivers))


def test_two_sources_with_half_the_share_are_as_good_as_one_whole() -> None:
    assert plan(fleet(2, 8, 128, share=0.5)).seconds == pytest.approx(plan(fleet(1, 8, 128)).seconds, rel=0.05)


def test_the_plan_is_near_the_floor() -> None:
    made = plan(fleet(1, 8, 256))
    assert made.seconds <= floor_seconds(256 * SIZE, 8, [1e9], 1e9, 1e9) * 1.1
    assert made.shape in ("chain", "swarm")


def test_a_chunk_crosses_the_network_once_per_host() -> None:
    made = plan(fleet(1, 8, 16, per_host=4))
    assert sum(a.path == "tcp" for a in made.assignments) == 2 * 16
    assert sum(a.path == "shm" for a in made.assignments) == 6 * 16


def test_as_many_sources_as_receivers_make_a_star() -> None:
    assert plan(fleet(4, 4, 32)).shape == "star"


def test_the_plan_says_what_limits_it_and_why_each_path() -> None:
    made = plan(fleet(1, 2, 8))
    assert "limited by s0:up" in made.reason
    assert made.reasons["r0/0", "s0/0"] == "no faster path"


def test_what_cannot_be_reached_is_refused_by_name() -> None:
    question = fleet(1, 2, 4)
    with pytest.raises(InvalidInput, match="no link brings chunk 0 of shard 0 to r1/0"):
        plan(replace(question, links=[n for n in question.links if n.receiver != "r1/0"]))
    with pytest.raises(InvalidInput, match="which has no capacity"):
        plan(replace(question, capacities={}))
    with pytest.raises(InvalidInput, match="s0/0 twice"):
        plan(replace(question, holders=[*question.holders] * 2))
