"""Who gets the devices that are free, where the next instance goes, and what may be read by whom. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.controller.decide.replicas import decide
from relight.controller.plan.order import STARVED_SECONDS, in_turn, waits
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core.records import (
    Demand,
    Desired,
    Guardians,
    Mode,
    ModelView,
    Placement,
    Plan,
    RungKind,
    Snapshot,
    Spread,
    Storage,
)
from relight.core.states import State
from support.planning import SPEC, instance, kinds, offers, slot

NOW = 100_000.0


def spec(name: str, **changes):
    return replace(SPEC, name=name, **{"replicas": 1, "guardians": Guardians(0), **changes})


def planned(slots, specs, instances=(), since=None, now=NOW):
    views = tuple(ModelView(s, Demand(0, 0.0, 0, now), waits_since=(since or {}).get(s.key)) for s in specs)
    snapshot = Snapshot(now, 1, 1, views, tuple(slots), tuple(instances))
    ids = itertools.count()
    return plan(snapshot, decide(snapshot), Predictions(), lambda p: f"{p}-new-{next(ids)}")


def ready(made):
    return [p.model for p in made.placements if p.desired is Desired.READY]


# ---------------------------------------------------------------- priority


def test_the_last_device_goes_to_the_model_of_higher_priority_and_the_other_waits() -> None:
    made = planned([slot("a")], [spec("a"), spec("b", priority=5)])
    assert ready(made) == ["default/b"]
    assert made.waiting == ("default/a",)


def test_no_priority_takes_down_what_serves() -> None:
    serving = instance("i-a", "a", State.READY, spec("a"))
    made = planned([slot("a")], [spec("a"), spec("b", priority=1_000_000_000)], [serving])
    assert made.placements == ()
    assert made.waiting == ("default/b",)


def test_one_that_waited_too_long_goes_before_every_priority() -> None:
    specs = [spec("a"), spec("b", priority=5)]
    assert ready(planned([slot("a")], specs, since={"default/a": NOW - STARVED_SECONDS + 1})) == ["default/b"]
    assert ready(planned([slot("a")], specs, since={"default/a": NOW - STARVED_SECONDS})) == ["default/a"]


def test_a_pool_that_is_short_holds_no_other_pools_guardians_back() -> None:
    short = spec("a", pool="x/p", replicas=2)
    other = spec("b", pool="y/p", guardians=Guardians(1))
    slots = [slot("a", pool="x/p"), slot("b", pool="y/p"), slot("c", pool="y/p")]
    made = planned(slots, [short, other])
    assert made.waiting == ("default/a",)
    assert [p.desired for p in made.placements if p.model == "default/b"] == [Desired.READY, Desired.DORMANT]


@given(st.lists(st.tuples(st.integers(-9, 9), st.none() | st.floats(0, NOW)), min_size=1, max_size=8), st.randoms())
def test_the_order_is_total_and_puts_the_starved_first_then_priority_then_age(found, random) -> None:
    views = [ModelView(spec(f"m{n}", priority=p), None, waits_since=s) for n, (p, s) in enumerate(found)]
    turns = in_turn(views, NOW)
    shuffled = views[:]
    random.shuffle(shuffled)
    assert in_turn(shuffled, NOW) == turns
    by_key = {v.spec.key: v for v in views}
    starved = [
        NOW - by_key[k].waits_since >= STARVED_SECONDS if by_key[k].waits_since is not None else False for k in turns
    ]
    assert starved == sorted(starved, reverse=True)
    ages = [by_key[k].waits_since for k, old in zip(turns, starved, strict=True) if old]
    assert ages == sorted(ages)
    priorities = [by_key[k].spec.priority for k, old in zip(turns, starved, strict=True) if not old]
    assert priorities == sorted(priorities, reverse=True)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.integers(5, 60))
@settings(deadline=None)
def test_however_many_of_higher_priority_want_more_nobody_waits_without_end(priorities, step) -> None:
    """One device is freed every `step` seconds, and every model always wants another."""
    specs = {f"default/m{n}": spec(f"m{n}", priority=p, replicas=9, max_replicas=9) for n, p in enumerate(priorities)}
    since: dict[str, float] = {}
    served = dict.fromkeys(specs, NOW)
    longest, now = 0.0, NOW
    for _ in range(int(3 * STARVED_SECONDS / step) + 10):
        views = [ModelView(s, None, waits_since=since.get(k)) for k, s in specs.items()]
        first = in_turn(views, now)[0]
        longest = max(longest, now - served[first])
        served[first] = now
        placed = Placement("i", first, Desired.READY, Mode.NORMAL, 2, (), (), (), "", None)
        since = waits(since, Plan(1, (), (placed,), waiting=tuple(specs)), now)
        now += step
    longest = max([longest, *(now - at for at in served.values())])
    # Each of the others may have been as long without, and goes first once.
    assert longest <= STARVED_SECONDS + len(specs) * step


# ---------------------------------------------------------------- spread


def spread(how: Spread, guardians: int = 0, replicas: int = 2):
    return spec("m", replicas=replicas, guardians=Guardians(guardians, 2, how))


HOSTS = [slot("a1", "boot-a"), slot("a2", "boot-a"), slot("a3", "boot-a"), slot("b1", "boot-b")]


def hosts(made):
    return sorted(s[0] for p in made.placements for s in p.slots)


def test_where_it_is_preferred_instances_keep_off_hosts_that_have_one_while_there_are_others() -> None:
    assert hosts(planned(HOSTS, [spread(Spread.NONE)])) == ["a", "a"]
    assert hosts(planned(HOSTS, [spread(Spread.PREFERRED)])) == ["a", "b"]
    assert hosts(planned(HOSTS, [spread(Spread.PREFERRED, guardians=1)])) == ["a", "a", "b"]


def test_where_it_is_required_the_next_stays_missing_and_the_reason_is_told() -> None:
    made = planned(HOSTS, [spread(Spread.REQUIRED, guardians=1)])
    assert hosts(made) == ["a", "b"]
    (told,) = made.unplaced
    assert "4 on a host that has another instance of it (spread)" in told


def test_a_guardian_keeps_a_replica_off_its_host_too() -> None:
    asleep = instance("i-g", "b1", State.DORMANT, spread(Spread.REQUIRED, guardians=1))
    made = planned(HOSTS, [spread(Spread.REQUIRED, guardians=1, replicas=1)], [asleep])
    # It wakes, and what is placed for it goes elsewhere.
    assert {p.instance: p.slots for p in made.placements if p.instance == "i-g"} == {"i-g": ("b1",)}
    assert [s for p in made.placements if p.instance != "i-g" for s in p.slots] == ["a1"]


# ---------------------------------------------------------------- encryption


@pytest.mark.parametrize(("address", "open_"), [("tls:h:1", True), ("tcp:h:1", False)])
def test_weights_that_shall_be_encrypted_cross_no_network_in_the_clear(address: str, open_: bool) -> None:
    asked = replace(SPEC, replicas=2, encrypt=True, storage=Storage("http://bucket/m"))
    cards = {"rdma": ""}
    offer = replace(offers("tcp", "rdma"), addresses={"tcp": address, "rdma": "rdma:h:1"})
    source = instance("i-source", "a", State.READY, asked, offer=offer)
    guardian = instance("i-guard", "b", State.DORMANT, asked)
    slots = [slot("a", "boot-a", transports=cards), slot("b", "boot-b", transports=cards, budget=1 << 30)]
    made = planned(slots, [asked], [source, guardian])
    (wake,) = [p for p in made.placements if p.instance == "i-guard"]
    assert kinds(wake) == [*([RungKind.PEER_TCP] if open_ else []), RungKind.DISK]
    for kind in (RungKind.PEER_RDMA, RungKind.STORAGE, *(() if open_ else (RungKind.PEER_TCP,))):
        assert f"{kind}: " in wake.reason
    assert "in the clear" in wake.reason


def test_on_one_host_nothing_crosses_a_network() -> None:
    asked = replace(SPEC, replicas=2, encrypt=True)
    source, guardian = instance("i-source", "a", State.READY, asked), instance("i-guard", "b", State.DORMANT, asked)
    made = planned([slot("a"), slot("b")], [asked], [source, guardian])
    (wake,) = [p for p in made.placements if p.instance == "i-guard"]
    assert kinds(wake)[0] is RungKind.PEER_SHM
