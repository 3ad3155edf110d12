"""Properties of where bundles are kept: balanced, stable, and never given up by the last who has one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from relight.agent.cache.placement import Holding, Membership, admit, moves, plan_repair, ranked

KEYS = [f"{n:032x}" for n in range(400)]
names = st.text("abcdefgh0123", min_size=1, max_size=6)
groups = st.sets(names, min_size=1, max_size=12)


def _members(nodes: set[str], replicas: int = 2, revision: int = 1) -> Membership:
    return Membership(revision, dict.fromkeys(nodes, "tcp:x:1"), replicas)


@given(groups, st.integers(1, 4))
def test_a_key_has_as_many_different_keepers_as_there_can_be(nodes: set[str], replicas: int) -> None:
    for key in KEYS[:20]:
        keepers = _members(nodes, replicas).keepers(key)
        assert len(set(keepers)) == len(keepers) == min(replicas, len(nodes))
        assert keepers == ranked(key, nodes)[: len(keepers)]


@given(groups, names, st.integers(1, 3))
def test_a_join_moves_placements_to_the_newcomer_alone(nodes: set[str], newcomer: str, replicas: int) -> None:
    before, after = _members(nodes - {newcomer}, replicas), _members(nodes | {newcomer}, replicas)
    for key in KEYS[:60]:
        old, new = before.keepers(key), after.keepers(key)
        assert set(new) - set(old) <= {newcomer}
        assert [n for n in new if n != newcomer] == [n for n in old if n in new]


@given(groups, st.data(), st.integers(1, 3))
def test_a_loss_moves_only_what_the_lost_one_had(nodes: set[str], data: st.DataObject, replicas: int) -> None:
    lost = data.draw(st.sampled_from(sorted(nodes)))
    before, after = _members(nodes, replicas), _members(nodes - {lost}, replicas)
    for key in KEYS[:60]:
        if lost not in before.keepers(key):
            assert after.keepers(key) == before.keepers(key)


@given(st.integers(3, 12))
@settings(max_examples=10, deadline=None)
def test_a_join_moves_about_one_nth(count: int) -> None:
    before = _members({f"n{i}" for i in range(count - 1)})
    after = _members({f"n{i}" for i in range(count)})
    found = moves(KEYS, before, after)
    assert found.placements == 2 * len(KEYS)
    # Six standard deviations of a binomial.
    floor = found.placements / count
    assert abs(found.moved - floor) <= 6 * floor**0.5


@st.composite
def rings(draw: st.DrawFn) -> tuple[Membership, dict[str, dict[str, Holding]], set[str]]:
    """Members, what each node holds, and which nodes answer."""
    nodes = draw(groups)
    members = _members(nodes, draw(st.integers(1, 3)))
    held = {
        node: {
            k: Holding(k, k * 2, draw(st.integers(0, 99)), draw(st.integers(0, 99)))
            for k in draw(st.sets(st.sampled_from(KEYS[:8])))
        }
        for node in sorted(nodes)
    }
    return members, held, draw(st.sets(st.sampled_from(sorted(nodes))))


@given(rings())
def test_no_repair_gives_up_a_bundle_unless_all_its_keepers_have_it(ring) -> None:
    members, held, answering = ring
    for me in held:
        others = {n: list(held[n].values()) for n in answering - {me}}
        plan = plan_repair(me, members, held[me].values(), others)
        for name in plan.drop:
            keepers = members.keepers(name[:32])
            assert me not in keepers
            assert all(name[:32] in held[k] for k in keepers)


@given(rings())
def test_repairs_of_all_nodes_end_with_every_bundle_at_its_keepers_alone(ring) -> None:
    members, held, _ = ring
    known = {k for node in held.values() for k in node}
    for _ in range(2):
        for me in sorted(held):
            others = {n: list(held[n].values()) for n in held if n != me}
            plan = plan_repair(me, members, held[me].values(), others)
            for holding, holders in plan.fetch:
                assert all(holding.key in held[h] for h in holders)
                held[me][holding.key] = holding
            for name in plan.drop:
                del held[me][name[:32]]
    for key in known:
        assert {n for n in held if key in held[n]} == set(members.keepers(key))
    for me in held:
        others = {n: list(held[n].values()) for n in held if n != me}
        assert plan_repair(me, members, held[me].values(), others).fetch == ()


sizes = st.integers(0, 100)


@given(st.lists(st.tuples(sizes, st.integers(0, 50)), max_size=12), sizes, st.integers(0, 300), st.integers(0, 60))
def test_what_comes_in_fits_and_pushes_out_only_what_was_used_before_it(
    held: list[tuple[int, int]], need: int, quota: int, used: int
) -> None:
    holdings = [Holding("k", f"{n:064x}", size, at) for n, (size, at) in enumerate(held)]
    said = admit(holdings, need, quota, used)
    gone = [h for h in holdings if h.bundle in said.evicted]
    kept = [h for h in holdings if h.bundle not in said.evicted]
    if not said.taken:
        assert not gone
        return
    assert sum(h.bytes for h in kept) + need <= quota
    assert all(h.last_use < used for h in gone)
    if gone:
        assert max(h.last_use for h in gone) <= min((h.last_use for h in kept), default=99)
        assert sum(h.bytes for h in [*kept, replace(gone[-1])]) + need > quota or len(gone) > 1
