"""Which slot keeps a copy of which weights, and which starts and wakes read it: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relight.controller.decide.replicas import decide
from relight.controller.observe.hosts import Hosts, told
from relight.controller.plan.fleet import runtime_digest
from relight.controller.plan.hosts import hosted
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.controller.plan.sources import Sources
from relight.core.fingerprint import digest
from relight.core.hosting import copy_name, room_for
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
    Storage,
)
from relight.core.states import State
from relight.transfer.grants import check
from support.planning import DEVICE, SPEC, instance, kinds, slot

LAYOUT = digest({"dtype": "bf16"})
KEY = "ab" * 32
WEIGHTS = 1 << 20
ROOM = room_for(WEIGHTS)
DISK_LAST = [RungKind.HOST_SHM, RungKind.HOST_TCP, RungKind.DISK]


def offer(*transports, layout=LAYOUT):
    return SourceOffer(1, "d", "c", layout, {t: f"{t}:h:1" for t in transports or ("shm", "tcp")}, WEIGHTS, {}, KEY)


def ready(name="i-a", where="a", **changes):
    return instance(name, where, State.READY, offer=offer(), **changes)


def content(spec=SPEC, version="1", kind="cpu"):
    return HostContent(spec.key, spec.revision, runtime_digest(spec), version, kind)


def copy(where, spec=SPEC, state=HostState.READY, made_of=None, **source):
    what = made_of or content(spec)
    found = offer(**source) if state is HostState.READY else None
    return HostCopyReport(copy_name(where, what), what, state, "", 2 << 20, found)


def seen(slots, instances=(), specs=(SPEC,), synced=True):
    views = tuple(ModelView(spec, Demand(0, 0.0, 0, None), "op-1") for spec in specs)
    return Snapshot(100.0, 1, 1, views, tuple(slots), tuple(instances), synced)


def kept(made):
    return {name: [w.copy for w in tier.wanted] for name, tier in made.tiers.items()}


def planned(snapshot):
    return plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-new")


# ---------------------------------------------------------------- where copies are kept


def test_a_model_with_a_ready_source_gets_one_copy_away_from_its_engine():
    made = hosted(seen([slot("a", budget=ROOM), slot("b", budget=ROOM)], [ready()]), {})
    (wanted,) = made.tiers["b"].wanted
    assert wanted.copy == copy_name("b", content())
    assert wanted.content == content()
    assert [r.kind for r in wanted.rungs] == [RungKind.PEER_SHM, RungKind.PEER_TCP]
    assert made.tiers["a"].wanted == ()
    assert made.missing == {}


def test_nothing_is_kept_without_a_budget_or_of_a_model_that_asks_for_no_copy():
    assert hosted(seen([slot("a")], [ready()]), {}).tiers == {}
    none = replace(SPEC, host_copies=0)
    made = hosted(seen([slot("a", budget=ROOM)], [ready(spec=none)], [none]), {})
    assert kept(made) == {"a": []}


@pytest.mark.parametrize(("budget", "instances", "why"), [
    (ROOM - 1, [ready()], "bytes are needed"),
    (ROOM, [], "no ready source"),
])  # fmt: skip
def test_what_stands_in_the_way_of_a_copy_is_told(budget, instances, why):
    assert why in hosted(seen([slot("a", budget=budget)], instances), {}).missing[SPEC.key]


def test_an_engine_of_several_devices_gets_no_copy_with_the_reason():
    wide = replace(SPEC, devices_per_member=2)
    assert "one device" in hosted(seen([slot("a", budget=ROOM)], [ready(spec=wide)], [wide]), {}).missing[SPEC.key]


def test_copies_stay_where_they_are_and_there_are_no_more_than_needed():
    slots = [slot(n, budget=ROOM, copies=[copy(n)] if n in "bc" else []) for n in "abc"]
    assert kept(hosted(seen(slots, [ready()]), {})) == {"a": [], "b": [copy("b").copy], "c": []}


def test_what_was_wanted_a_moment_ago_stays_although_nobody_has_reported_it():
    before = hosted(seen([slot("b", budget=ROOM)], [ready()]), {}).tiers
    made = hosted(seen([slot("a", budget=ROOM * 4), slot("b", budget=ROOM)], [ready()]), before)
    assert kept(made) == {"a": [], "b": [copy("b").copy]}


def test_a_copy_outlives_every_engine_and_goes_with_its_model():
    slots = [slot("b", budget=ROOM, copies=[copy("b")])]
    made = hosted(seen(slots), {})
    assert kept(made) == {"b": [copy("b").copy]}
    assert made.tiers["b"].wanted[0].rungs == ()
    assert kept(hosted(seen(slots, specs=()), made.tiers)) == {"b": []}


def test_another_revision_replaces_the_copy_once_it_can_be_read():
    slots = [slot("a"), slot("b", budget=ROOM, copies=[copy("b")])]
    newer = replace(SPEC, revision="r2")
    assert kept(hosted(seen(slots, [ready()], [newer]), {})) == {"b": []}
    made = hosted(seen(slots, [ready(spec=newer)], [newer]), {})
    assert kept(made) == {"b": [copy_name("b", content(newer))]}


def test_a_copy_of_an_engine_that_was_upgraded_is_replaced_and_kept_while_no_new_one_runs():
    slots = [slot("b", budget=ROOM * 2, copies=[copy("b", made_of=content(version="0"), layout="old")])]
    assert kept(hosted(seen(slots), {})) == {"b": [copy("b", made_of=content(version="0")).copy]}
    slots = [slot("a"), *slots]
    assert kept(hosted(seen(slots, [ready()]), {})) == {"b": [copy_name("b", content())]}


def test_a_second_copy_reads_the_first_when_no_engine_is_there():
    two = replace(SPEC, host_copies=2)
    slots = [slot("b", budget=ROOM, copies=[copy("b")]), slot("c", "other", budget=ROOM)]
    (wanted,) = hosted(seen(slots, (), [two]), {}).tiers["c"].wanted
    assert [(r.kind, r.source.instance) for r in wanted.rungs] == [(RungKind.HOST_TCP, copy("b").copy)]


def test_a_new_copy_of_one_model_does_not_push_out_anothers():
    other = replace(SPEC, name="a-first-in-order")
    slots = [slot("a"), slot("b", budget=ROOM, copies=[copy("b")])]
    made = hosted(seen(slots, [ready(spec=other)], [SPEC, other]), {})
    assert kept(made) == {"b": [copy("b").copy]}
    assert "bytes are needed" in made.missing[other.key]


def test_a_copy_that_failed_is_tried_again_where_it_is_and_dropped_without_a_source():
    slots = [slot("a"), slot("b", budget=ROOM, copies=[copy("b", state=HostState.FAILED)]), slot("c", budget=ROOM)]
    assert kept(hosted(seen(slots, [ready()]), {}))["b"] == [copy("b").copy]
    assert kept(hosted(seen(slots), {}))["b"] == []


def test_each_slot_is_told_its_own_copies_with_grants_that_their_sources_accept():
    hosts = Hosts()
    hosts.update(seen([slot("a", budget=0), slot("b", budget=ROOM)], [ready()], synced=False))
    assert hosts.present is None
    hosts.update(seen([slot("a", budget=0), slot("b", budget=ROOM), slot("c")], [ready()]))
    assert hosts.present is not None
    tier = told(hosts.present, "b", 100.0)
    assert tier is not None
    source = tier.wanted[0].rungs[0].source
    claims = check(KEY, source.grant, now=200.0, source_instance="i-a", generation=1, manifest_digest=lambda: "d")
    assert claims.receiver == tier.wanted[0].copy
    assert KEY not in repr(hosts.present) + repr(tier)
    assert told(hosts.present, "c", 100.0) is None


def test_nobody_is_told_anew_while_nothing_changes():
    hosts, calls = Hosts(), []
    hosts.listen(lambda: calls.append(1))
    for _ in range(3):
        hosts.update(seen([slot("a"), slot("b", budget=ROOM)], [ready()]))
    assert calls == [1]


# ---------------------------------------------------------------- who reads them


def test_after_the_last_replica_a_wake_reads_the_copy_before_the_disk():
    asleep = instance("i-b", "b", State.DORMANT)
    (wake,) = [p for p in planned(seen([slot("b", budget=ROOM, copies=[copy("b")])], [asleep])).placements
               if p.instance == "i-b"]  # fmt: skip
    assert kinds(wake) == DISK_LAST
    assert wake.rungs[0].source.instance == copy("b").copy
    assert "copy in the memory on the same host" in wake.rungs[0].reason


def test_a_peer_comes_before_the_copy_and_another_host_reads_it_by_tcp():
    slots = [slot("a"), slot("c"), slot("b", "other", budget=ROOM, copies=[copy("b")])]
    found = planned(seen(slots, [ready(), instance("i-b", "c", State.DORMANT)]))
    (wake,) = [p for p in found.placements if p.instance == "i-b"]
    assert kinds(wake) == [RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.HOST_TCP, RungKind.DISK]
    assert "host_shm: " in wake.reason


def test_an_engine_that_starts_reads_the_copy_where_all_is_equal_that_decides_its_layout():
    spec = replace(SPEC, replicas=1, guardians=Guardians(), mode=Mode.LAZY)
    start = planned(seen([slot("b", budget=ROOM, copies=[copy("b")])], specs=[spec])).placements[0]
    assert kinds(start) == DISK_LAST
    for other, why in (
        (content(version="0"), "layout.engine: stub '1' here, '0' there"),
        (content(kind="cuda"), "layout.device: cpu here, cuda there"),
        (content(replace(SPEC, args=("x",))), "other arguments"),
    ):
        found = planned(seen([slot("b", budget=ROOM, copies=[copy("b", made_of=other)])], specs=[spec]))
        assert kinds(found.placements[0]) == [RungKind.DISK]
        assert why in found.placements[0].reason


def test_a_guardian_of_another_layout_is_refused_the_copy_by_its_digest():
    asleep = instance("i-b", "b", State.DORMANT, layout="fp8")
    found = planned(seen([slot("b", budget=ROOM, copies=[copy("b")])], [asleep]))
    (wake,) = [p for p in found.placements if p.instance == "i-b"]
    assert kinds(wake) == [RungKind.DISK]
    assert "layout digest" in wake.reason


def test_a_copy_of_a_slot_that_is_gone_is_offered_to_nobody():
    gone = replace(slot("b", budget=ROOM, copies=[copy("b")]), alive=False)
    found = planned(seen([slot("a"), gone], [instance("i-a", "a", State.DORMANT)]))
    (wake,) = [p for p in found.placements if p.instance == "i-a"]
    assert kinds(wake) == [RungKind.DISK]


def test_a_copy_is_no_replica():
    spec = replace(SPEC, replicas=1, guardians=Guardians())
    with_copy, without = (decide(seen([slot("b", budget=ROOM, copies=c)], specs=[spec])) for c in ([copy("b")], []))
    assert with_copy == without
    assert len(planned(seen([slot("b", budget=ROOM, copies=[copy("b")])], specs=[spec])).placements) == 1


# ---------------------------------------------------------------- what is read ahead


def ahead(made):
    return {name: [p.uri for p in tier.prefetch] for name, tier in made.tiers.items()}


def test_an_announced_model_that_nobody_holds_is_read_ahead_where_its_engine_could_start():
    announced = replace(SPEC, replicas=0)
    slots = [slot("a", budget=ROOM), slot("b", budget=0), slot("c", budget=ROOM, devices=())]
    assert ahead(hosted(seen(slots, specs=[announced]), {})) == {"a": ["/m"], "b": [], "c": []}


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, replicas=0, host_copies=0)])
def test_a_model_that_starts_anyway_or_wants_no_copy_is_not_read_ahead(spec):
    assert ahead(hosted(seen([slot("a", budget=ROOM)], specs=[spec]), {})) == {"a": []}


def test_nothing_is_read_ahead_of_what_an_engine_or_a_copy_holds():
    announced = replace(SPEC, replicas=0)
    held = [slot("a", budget=ROOM * 2, copies=[copy("a")])]
    assert ahead(hosted(seen(held, specs=[announced]), {})) == {"a": []}
    asleep = [instance("i-a", "a", State.DORMANT, spec=announced)]
    assert ahead(hosted(seen([slot("a", budget=ROOM)], asleep, [announced]), {})) == {"a": []}


def test_what_is_read_ahead_is_told_to_its_slot_with_where_it_lies_in_storage():
    spec = replace(SPEC, replicas=0, storage=Storage("https://s/m?sig=x"))
    hosts = Hosts()
    hosts.update(seen([slot("a", budget=ROOM)], specs=[spec]))
    assert hosts.present is not None
    (prefetch,) = told(hosts.present, "a", 100.0).prefetch
    assert (prefetch.model, prefetch.storage) == (spec.key, spec.storage)


@pytest.mark.parametrize(
    ("storage", "budget", "why"),
    [
        (None, ROOM, "storage: the model names none"),
        (Storage("https://s/m?sig=x"), None, "storage: slot a sets no memory aside for it"),
        (Storage("https://s/m?sig=x"), 0, "storage: slot a sets no memory aside for it"),
        (Storage("https://s/m?sig=x"), ROOM, ""),
    ],
)
def test_remote_storage_is_read_before_the_disk_where_a_model_names_it_and_a_slot_has_memory(storage, budget, why):
    spec = replace(SPEC, replicas=1, mode=Mode.NORMAL, storage=storage)
    snapshot = seen([slot("a", budget=budget)], specs=[spec])
    (placed,) = [p for p in planned(snapshot).placements if p.rungs and p.desired is Desired.READY]
    assert kinds(placed) == ([RungKind.DISK] if why else [RungKind.STORAGE, RungKind.DISK])
    ladder = Sources(snapshot).fresh(spec, [("a", (DEVICE,))], ())
    assert [r for r in ladder.refused if r.startswith("storage")] == ([why] if why else [])
    assert "sig" not in repr((placed, ladder))
