"""Two tenants in one fleet: nothing of one reaches the other, whatever its slots say of themselves. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.controller.decide.replicas import decide
from relight.controller.kubernetes.reviews import User
from relight.controller.kubernetes.slot_identity import POD_NAME, slot_name
from relight.controller.observe.ring import Rings, told
from relight.controller.plan.fleet import runtime_digest
from relight.controller.plan.hosts import hosted
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core.errors import Denied
from relight.core.hosting import copy_name, room_for
from relight.core.records import (
    CacheReport,
    Demand,
    Guardians,
    HostContent,
    HostCopyReport,
    HostState,
    ModelView,
    Snapshot,
)
from relight.core.states import State
from relight.core.tenants import tenant
from support.planning import SPEC, instance, offers, slot

NOW = 1_000.0
ROOM = room_for(1 << 20)


def spec(namespace: str, **changes):
    return replace(SPEC, namespace=namespace, pool=f"{namespace}/pool", guardians=Guardians(0), **changes)


def seen(slots, instances=(), specs=()):
    views = tuple(ModelView(s, Demand(0, 0.0, 0, NOW)) for s in specs)
    return Snapshot(NOW, 1, 1, views, tuple(slots), tuple(instances))


def copy(where: str, of) -> HostCopyReport:
    content = HostContent(of.key, of.revision, runtime_digest(of), "1", "cpu")
    return HostCopyReport(copy_name(where, content), content, HostState.READY, "", 2 << 20, offers("shm", "tcp"))


def node(n: int) -> CacheReport:
    return CacheReport(f"tcp:10.0.0.{n}:7", f"{n:064x}", grant_key=f"{n:02x}" * 32)


def test_a_slot_is_told_of_the_cache_nodes_and_signers_of_its_own_tenant_alone() -> None:
    rings = Rings()
    slots = [
        replace(slot(f"s{n}", pool=pool), cache=node(n), signers=(f"{n:064x}",))
        for n, pool in enumerate(("a/pool", "a/other", "b/pool"), 1)
    ]
    rings.update(1, seen(slots))
    ring = told(rings.of("a"), "s1", NOW)
    assert [n.slot for n in ring.nodes] == ["s1", "s2"]
    assert ring.signers == (f"{1:064x}", f"{2:064x}")
    assert [n.slot for n in told(rings.of("b"), "s3", NOW).nodes] == ["s3"]


def test_a_copy_that_another_tenants_slot_claims_to_hold_is_not_read() -> None:
    ours = spec("a", replicas=1)
    own = slot("own", pool="a/pool", budget=0)
    honest, lying = (slot(n, pool=p, budget=ROOM, copies=[copy(n, ours)]) for n, p in (("kept", "a/x"), ("lie", "b/x")))

    def sources(*slots):
        snapshot = seen(slots, specs=[ours])
        (made,) = plan(snapshot, decide(snapshot), Predictions(), str).placements
        return {r.source.slot for r in made.rungs if r.source}

    assert sources(own, lying) == set()
    assert sources(own, lying, honest) == {"kept"}


@st.composite
def fleets(draw):
    specs = [
        spec(n, replicas=draw(st.integers(0, 3)), host_copies=draw(st.integers(0, 2)), max_replicas=3)
        for n in ("a", "b")
    ]
    slots, instances = [], []
    for n in range(draw(st.integers(1, 6))):
        pool = draw(st.sampled_from(["a/pool", "b/pool", "a/nodes", ""]))
        claims = [copy(f"s{n}", s) for s in specs if draw(st.booleans())]
        slots.append(slot(f"s{n}", pool=pool, budget=draw(st.sampled_from([0, 4 * ROOM])), copies=claims))
        own = next((s for s in specs if s.pool == pool), None)
        if own and draw(st.booleans()):
            state = draw(st.sampled_from([State.READY, State.DORMANT]))
            instances.append(instance(f"i{n}", f"s{n}", state, own))
    return seen(slots, instances, specs)


@given(fleets())
def test_no_rung_leads_to_another_tenant_and_no_copy_is_kept_there(snapshot) -> None:
    tenants = {s.slot: tenant(s.pool) for s in snapshot.slots}
    ids = itertools.count()
    made = plan(snapshot, decide(snapshot), Predictions(), lambda p: f"{p}-{next(ids)}")
    kept = hosted(snapshot, {})
    read = [(p.slots[0], r) for p in made.placements for r in p.rungs]
    read += [(name, r) for name, tier in kept.tiers.items() for w in tier.wanted for r in w.rungs]
    for receiver, rung in read:
        sources = [s for s in (rung.source, *rung.helpers) if s is not None]
        assert {tenants[s.slot] for s in sources} <= {tenants[receiver]}
    for name, tier in kept.tiers.items():
        models = {w.content.model for w in tier.wanted} | {p.model for p in tier.prefetch}
        assert {m.partition("/")[0] for m in models} <= {tenants[name]}


@pytest.mark.parametrize(
    ("user", "slot_"),
    [
        (User("system:serviceaccount:a:default", extra=((POD_NAME, ("p-1",)),)), "p-1.a"),
        (User("system:serviceaccount:a:default"), ".a"),
    ],
)
def test_a_token_names_the_slot_that_it_was_made_for(user: User, slot_: str) -> None:
    assert slot_name(user) == slot_


@pytest.mark.parametrize("name", ["admin", "system:serviceaccount:", "system:serviceaccount:a", "system:node:p-1"])
def test_who_is_no_service_account_is_no_slot(name: str) -> None:
    with pytest.raises(Denied, match="is no service account"):
        slot_name(User(name, extra=((POD_NAME, ("p-1",)),)))
