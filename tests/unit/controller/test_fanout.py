"""Who passes on to whom when several guardians wake at once: what the rungs say, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.controller.decide.replicas import decide
from relight.controller.plan.fleet import runtime_digest
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core.fingerprint import digest
from relight.core.hosting import copy_name
from relight.core.records import (
    Demand,
    Desired,
    Guardians,
    HostContent,
    HostCopyReport,
    HostState,
    Mode,
    ModelView,
    RungKind,
    Snapshot,
    SourceOffer,
)
from relight.core.states import State
from support.planning import SPEC, instance, offers, relays, slot

GIB = 1 << 30


def full(*transports, **changes):
    return replace(offers(*(transports or ("shm", "tcp"))), weight_bytes=GIB, **changes)


def woken(asleep, slots, *, spec=SPEC, offer=None, awake=1, told=None):
    """The wakes of all of `asleep`, with `awake` replicas to read from on slots s0, s1, and so on; `told` is what the
    sleepers were started by, where the model was changed since."""
    spec = replace(spec, replicas=awake + len(asleep), guardians=Guardians(0))
    ready = [instance(f"i-a{n}", f"s{n}", State.READY, spec, offer=offer or full()) for n in range(awake)]
    views = [replace(i, spec=told or spec) for i in asleep]
    snapshot = Snapshot(
        100.0, 1, 1, (ModelView(spec, Demand(0, 0.0, 0, None), "op-1"),), tuple(slots), (*ready, *views)
    )  # fmt: skip
    found = plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new")
    return {p.instance: p for p in found.placements if p.mode is Mode.GUARDIAN and p.desired is Desired.READY}


def apart(count, **changes):
    """Sleepers on hosts of their own, and all slots with those of two sources."""
    asleep = [instance(f"i-b{n}", f"b{n}", State.DORMANT, relay=relays("shm", "tcp"), **changes) for n in range(count)]
    slots = [slot(f"s{n}", boot=f"source {n}") for n in range(2)]
    return asleep, [*slots, *(slot(f"b{n}", boot=f"host {n}") for n in range(count))]


def references(placement):
    rung = placement.rungs[0]
    return [rung.source, *rung.helpers]


def test_four_on_hosts_of_their_own_take_each_part_from_the_source_once_between_them() -> None:
    wakes = woken(*apart(4))
    assert len(wakes) == 4
    taken = Counter(part for p in wakes.values() for r in references(p) if not r.filling for part in r.parts)
    parts = wakes["i-b0"].rungs[0].deal.parts
    assert taken == Counter(range(parts))
    for turn, placement in enumerate(wakes.values()):
        deal = placement.rungs[0].deal
        assert (deal.shape, deal.receivers, deal.turn) == ("swarm", 4, turn)
        assert sorted(part for r in references(placement) for part in r.parts) == list(range(parts))
        assert {r.instance for r in references(placement) if r.filling} == set(wakes) - {placement.instance}
        assert "swarm takes 1.0" in placement.reason
        assert placement.reason.endswith(deal.told)
        # Whoever has everything can be fallen back to by all.
        assert placement.rungs[0].source.instance == "i-a0"


def test_on_one_host_everybody_reads_the_source_and_the_record_says_that_memory_is_the_limit() -> None:
    asleep = [instance(f"i-b{n}", f"b{n}", State.DORMANT, relay=relays("shm", "tcp")) for n in range(4)]
    wakes = woken(asleep, [slot("s0"), *(slot(f"b{n}") for n in range(4))])
    assert len(wakes) == 4
    for placement in wakes.values():
        deal = placement.rungs[0].deal
        assert (deal.shape, deal.parts) == ("star", 0)
        assert "limited by memory of b0's host" in deal.reason
        assert [r.instance for r in references(placement)] == ["i-a0"]


def test_a_part_crosses_the_network_once_for_a_host_and_is_passed_on_there_by_memory() -> None:
    asleep = [
        instance(f"i-b{n}", f"b{n}", State.DORMANT, relay=relays("shm", "tcp", host=f"h{n}")) for n in range(4)
    ]  # fmt: skip
    slots = [slot("s0", boot="source"), *(slot(f"b{n}", boot=f"host {n // 2}") for n in range(4))]
    wakes = woken(asleep, slots)
    for host in (("i-b0", "i-b1"), ("i-b2", "i-b3")):
        far = Counter(
            part for name in host for r in references(wakes[name]) if r.instance not in host for part in r.parts
        )  # fmt: skip
        assert far == Counter(range(wakes["i-b0"].rungs[0].deal.parts))
        for name in host:
            near = [r for r in references(wakes[name]) if r.instance in host]
            assert [r.address.partition(":")[0] for r in near] == ["unix"]


def test_as_many_sources_as_sleepers_are_read_by_themselves() -> None:
    for placement in woken(*apart(2), awake=2).values():
        assert placement.rungs[0].deal.shape == "star"
        assert not any(r.filling for r in references(placement))


def test_one_that_wakes_alone_divides_nothing() -> None:
    (placement,) = woken(*apart(1)).values()
    assert placement.rungs[0].deal is None


def test_a_bound_on_the_source_is_what_limits_and_is_told() -> None:
    wakes = woken(*apart(4), offer=full(rate_limit=10_000_000))
    assert "limited by share of i-a0" in wakes["i-b0"].rungs[0].deal.reason
    assert wakes["i-b0"].rungs[0].deal.seconds == pytest.approx(GIB / 1e7, rel=0.05)


@pytest.mark.parametrize("limit", [0, -1, -(10**18)])
def test_a_bound_that_is_none_is_no_bound(limit: int) -> None:
    assert "share" not in woken(*apart(4), offer=full(rate_limit=limit))["i-b0"].rungs[0].deal.reason


def test_a_source_that_others_read_already_counts_for_less() -> None:
    asleep, slots = apart(2)
    fill = instance("i-c", "c", State.WAKING, desired=Desired.READY, reads="i-a0")
    spec = replace(SPEC, replicas=4, guardians=Guardians(0))
    ready = instance("i-a0", "s0", State.READY, spec, offer=full())
    everybody = [replace(i, spec=spec) for i in (ready, fill, *asleep)]
    snapshot = Snapshot(
        100.0, 1, 1, (ModelView(spec, Demand(0, 0.0, 0, None), "op-1"),), (*slots, slot("c", boot="c")),
        tuple(everybody),
    )  # fmt: skip
    found = plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new")
    deals = {p.instance: p.rungs[0].deal for p in found.placements if p.mode is Mode.GUARDIAN and p.rungs}
    assert "limited by share of i-a0" in deals["i-b0"].reason


def test_an_engine_that_passes_nothing_on_is_filled_all_the_same() -> None:
    asleep, slots = apart(3)
    asleep[1] = instance("i-b1", "b1", State.DORMANT)
    wakes = woken(asleep, slots)
    for name, placement in wakes.items():
        assert "i-b1" not in {r.instance for r in references(placement) if r.filling}
        parts = sorted(part for r in references(placement) for part in r.parts)
        assert parts == list(range(placement.rungs[0].deal.parts)), name


def test_who_holds_another_layout_is_no_neighbour() -> None:
    asleep, slots = apart(2)
    asleep[1] = instance("i-b1", "b1", State.DORMANT, relay=relays("shm", "tcp", layout="other"))
    for placement in woken(asleep, slots).values():
        assert not any(r.filling for r in references(placement))


def test_what_has_to_be_encrypted_is_passed_on_by_those_that_encrypt_alone() -> None:
    spec = replace(SPEC, encrypt=True)
    secret = SourceOffer(1, "d", "c", "", {"shm": "unix:/s", "tcp": "tls:h:1"}, GIB, {}, "ab")
    asleep, slots = apart(2, spec=spec)
    for started_by in (spec, SPEC):
        for placement in woken(asleep, slots, spec=spec, offer=secret, told=started_by).values():
            assert not any(r.filling for r in references(placement))
    hidden = replace(relays("shm", "tcp"), addresses={"tcp": "tls:h:1"})
    asleep = [instance(f"i-b{n}", f"b{n}", State.DORMANT, relay=hidden, spec=spec) for n in range(2)]
    wakes = woken(asleep, slots, spec=spec, offer=secret)
    assert all(any(r.filling for r in references(p)) for p in wakes.values())


def test_between_cards_it_is_passed_on_by_cards_and_never_by_something_slower() -> None:
    asleep, _ = apart(3)
    carded = relays("shm", "tcp", "rdma")
    asleep = [instance(f"i-b{n}", f"b{n}", State.DORMANT, relay=carded if n else relays("tcp")) for n in range(3)]
    both = {"rdma": ""}
    slots = [slot("s0", boot="source", transports=both), *(slot(f"b{n}", f"h{n}", transports=both) for n in range(3))]
    for placement in woken(asleep, slots, offer=full("shm", "rdma", "tcp")).values():
        assert placement.rungs[0].kind is RungKind.PEER_RDMA
        assert {r.address.partition(":")[0] for r in references(placement)} == {"rdma"}
        assert "i-b0" not in {r.instance for r in references(placement) if r.filling}


def test_from_zero_those_that_read_a_copy_of_another_host_pass_it_on_too() -> None:
    asleep, slots = apart(3)
    layout = digest({"dtype": "bf16"})
    content = HostContent(SPEC.key, SPEC.revision, runtime_digest(SPEC), "1", "cpu")
    source = SourceOffer(1, "d", "c", layout, {"shm": "unix:/s", "tcp": "tcp:h:1"}, GIB, {}, "ab" * 32)
    copy = HostCopyReport(copy_name("s0", content), content, HostState.READY, "", GIB, source)
    slots[0] = slot("s0", boot="source 0", budget=2 * GIB, copies=[copy])
    spec = replace(SPEC, rungs=(RungKind.HOST_SHM, RungKind.HOST_TCP, RungKind.DISK))
    wakes = woken([replace(i, spec=spec) for i in asleep], slots, spec=spec, awake=0)
    assert len(wakes) == 3
    taken = Counter(part for p in wakes.values() for r in references(p) if not r.filling for part in r.parts)
    assert taken == Counter(range(wakes["i-b0"].rungs[0].deal.parts))


def test_nothing_is_passed_on_between_tenants() -> None:
    asleep, slots = apart(2)
    slots = [replace(s, pool=f"{'x' if s.slot == 'b1' else 'default'}/pool") for s in slots]
    spec = replace(SPEC, pool="default/pool")
    for placement in woken(asleep, slots, spec=spec).values():
        assert not any(r.filling for r in references(placement))


def test_the_time_that_sharing_adds_is_predicted() -> None:
    alone = woken(*apart(1))["i-b0"].predicted_seconds
    asleep = [instance(f"i-b{n}", f"b{n}", State.DORMANT) for n in range(4)]
    four = woken(asleep, apart(4)[1])["i-b0"]
    assert four.rungs[0].deal.shape == "star"
    assert four.predicted_seconds == pytest.approx(alone + 3 * GIB / 1e9, rel=0.05)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=2, max_size=9),
    st.integers(1, 3), st.sampled_from([1, 300_000, 1 << 24, GIB, 348 * 10**9]),
    st.none() | st.integers(-1, 10**10),
)  # fmt: skip
def test_every_part_comes_once_from_somebody_who_will_have_it(sleepers, awake, size, limit) -> None:
    asleep = [
        instance(f"i-b{n}", f"b{n}", State.DORMANT, relay=relays("shm", "tcp") if passes else None)
        for n, (_, _, passes) in enumerate(sleepers)
    ]
    slots = [slot(f"s{n}", boot=f"host {n}") for n in range(awake)]
    slots += [slot(f"b{n}", f"host {host}", force_tcp=forced) for n, (host, forced, _) in enumerate(sleepers)]
    wakes = woken(asleep, slots, awake=awake, offer=replace(full(), weight_bytes=size, rate_limit=limit))
    assert len(wakes) == len(sleepers)
    has = {name: set() for name in wakes}
    wanted = {}
    for name, placement in wakes.items():
        deal = placement.rungs[0].deal
        dealt = sorted(part for r in references(placement) for part in r.parts)
        assert dealt == list(range(deal.parts))
        wanted[name] = [(part, r.instance, r.filling) for r in references(placement) for part in r.parts]
    while any(wanted.values()):
        before = sum(map(len, wanted.values()))
        for name, left in wanted.items():
            come = [w for w in left if not w[2] or w[0] in has[w[1]]]
            has[name] |= {part for part, _, _ in come}
            wanted[name] = [w for w in left if w not in come]
        assert sum(map(len, wanted.values())) < before, "they wait for each other"


@pytest.mark.parametrize(("transport", "boot", "transports"), [("nvlink", "source 0", {}), ("nixl", "", {"rdma": ""})])
def test_sleepers_on_devices_that_wake_at_once_read_the_ready_one_each(transport, boot, transports):
    asleep = [instance(f"i-b{n}", f"b{n}", State.DORMANT, relay=relays("tcp")) for n in range(2)]
    slots = [slot("s0", boot="source 0", transports=transports)]
    slots += [slot(f"b{n}", boot=boot or f"host {n}", transports=transports) for n in range(2)]
    found = woken(asleep, slots, offer=full(transport, "tcp"))
    assert len(found) == 2
    for placement in found.values():
        rung = placement.rungs[0]
        assert rung.kind is RungKind(f"peer_{transport}")
        assert [ref.instance for ref in (rung.source, *rung.helpers)] == ["i-a0"]
