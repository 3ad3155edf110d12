"""Which mode a missing replica takes, what every mode is said to cost, and why one gives way to another."""

import dataclasses

import pytest

from relight.controller.decide.replicas import decide
from relight.controller.plan.modes import choose
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Measured, Predictions
from relight.core.records import (
    Demand,
    Desired,
    DeviceReport,
    Failure,
    Guardians,
    Mode,
    ModelView,
    Price,
    RungKind,
    Snapshot,
)
from relight.core.states import State
from support.planning import DEVICE, SPEC, instance, kinds, slot

ALONE = dataclasses.replace(SPEC, replicas=2, guardians=Guardians())
STARTS = [Mode.LAZY, Mode.NORMAL, Mode.COLD]


def made(instances, slots, spec=ALONE, rungs=(), measured=None):
    view = ModelView(spec, Demand(0, 0.0, 0, None), "op-1", rungs)
    snapshot = Snapshot(100.0, 1, 1, (view,), tuple(slots), tuple(instances))
    return plan(snapshot, decide(snapshot), Predictions(measured or {}), lambda prefix: f"{prefix}-new")


def started(found):
    return next(p for p in found.placements if p.instance == "i-new")


def took(mode, seconds):
    """What measuring a mode of SPEC by disk teaches."""
    way = "cold" if mode is Mode.COLD else f"{mode}/disk"
    return {(SPEC.key, way, "cpu"): Measured(seconds, {"engine": seconds}, 3, seconds)}


def price(mode, seconds, *, fits=True, measured=False):
    return Price(mode, seconds, fits, f"why of {mode}", {}, measured)


def ready(**changes):
    return instance("i-a", "a", State.READY, ALONE, **changes)


@pytest.mark.parametrize("mode", STARTS)
def test_a_named_mode_of_starting_is_taken_and_all_four_are_priced(mode):
    spec = dataclasses.replace(ALONE, mode=mode)
    start = started(made([ready()], [slot("a"), slot("b")], spec))
    assert (start.mode, start.desired) == (mode, Desired.READY)
    assert [p.mode for p in start.prices] == [Mode.GUARDIAN, *STARTS]
    assert all(p.parts and p.reason for p in start.prices if p.fits)
    assert f"{mode} in" in start.reason
    assert "as asked for" in start.reason


def test_a_start_gets_the_whole_ladder_and_a_cold_one_the_disk_alone():
    slots = [slot("a"), slot("b")]
    lazy = started(made([ready()], slots))
    assert lazy.mode is Mode.LAZY
    assert kinds(lazy) == [RungKind.PEER_SHM, RungKind.PEER_TCP, RungKind.DISK]
    assert lazy.rungs[0].source.instance == "i-a"
    assert "host_copy: an engine that starts has none" in lazy.reason
    cold = started(made([ready()], slots, dataclasses.replace(ALONE, mode=Mode.COLD)))
    assert kinds(cold) == [RungKind.DISK]


def test_without_a_measurement_auto_prefers_lazy_to_normal_and_never_takes_cold():
    start = started(made([], [slot("a")]))
    seconds = {p.mode: p.seconds for p in start.prices}
    assert start.mode is Mode.LAZY
    assert seconds[Mode.LAZY] < seconds[Mode.NORMAL] < seconds[Mode.COLD]
    assert not any(p.measured for p in start.prices)


def test_auto_takes_the_slower_mode_by_name_only_where_both_were_measured():
    slots = [slot("a")]
    both = {**took(Mode.LAZY, 8.0), **took(Mode.NORMAL, 5.0)}
    assert started(made([], slots, measured=both)).mode is Mode.NORMAL
    assert started(made([], slots, measured=took(Mode.LAZY, 80.0))).mode is Mode.LAZY
    assert started(made([], slots, measured=took(Mode.NORMAL, 1.0))).mode is Mode.LAZY
    quick_cold = {**took(Mode.LAZY, 8.0), **took(Mode.COLD, 1.0)}
    assert started(made([], slots, measured=quick_cold)).mode is Mode.LAZY


def test_auto_takes_cold_where_no_rung_is_open_and_says_that_nothing_else_fits():
    start = started(made([], [slot("a")], rungs=(RungKind.PEER_TCP,)))
    assert start.mode is Mode.COLD
    assert "nothing else fits" in start.reason
    assert "lazy: no rung is open: " in start.reason


@pytest.mark.parametrize(
    ("wanted", "closed", "taken"),
    [
        (Mode.GUARDIAN, (Mode.GUARDIAN,), Mode.LAZY),
        (Mode.GUARDIAN, (Mode.GUARDIAN, Mode.LAZY), Mode.NORMAL),
        (Mode.LAZY, (Mode.LAZY,), Mode.NORMAL),
        (Mode.LAZY, (Mode.LAZY, Mode.NORMAL), Mode.COLD),
        (Mode.NORMAL, (Mode.NORMAL,), Mode.COLD),
        (Mode.NORMAL, (), Mode.NORMAL),
    ],
)
def test_a_named_mode_that_does_not_fit_gives_way_to_the_next_slower_with_the_reason(wanted, closed, taken):
    # The faster ones are open and cheap: a named mode goes down, never up.
    prices = [price(mode, n, fits=mode not in closed) for n, mode in enumerate((Mode.GUARDIAN, *STARTS))]
    best, why = choose(wanted, prices)
    assert best is not None
    assert best.mode is taken
    if closed:
        assert f"{wanted} is asked for and does not fit" in why
        assert all(f"{mode}: why of {mode}" in why for mode in closed)


def test_cold_by_name_has_nothing_below_it():
    best, why = choose(Mode.COLD, [price(Mode.LAZY, 1.0), price(Mode.COLD, 60.0, fits=False)])
    assert best is None
    assert why == "cold: why of cold"


def test_a_model_that_names_guardian_without_one_standing_by_starts_lazily_and_says_why():
    start = started(made([], [slot("a")], dataclasses.replace(ALONE, mode=Mode.GUARDIAN)))
    assert start.mode is Mode.LAZY
    assert "guardian: no guardian of it stands by" in start.reason


def test_a_model_that_names_lazy_leaves_its_guardians_asleep():
    spec = dataclasses.replace(ALONE, mode=Mode.LAZY, guardians=Guardians(1, 2))
    asleep = instance("i-b", "b", State.DORMANT, spec)
    found = made([ready(), asleep], [slot("a"), slot("b"), slot("c")], spec)
    assert [(p.instance, p.mode) for p in found.placements] == [("i-new", Mode.LAZY)]
    assert next(p for p in found.placements[0].prices if p.mode is Mode.GUARDIAN).fits


@pytest.mark.parametrize(
    ("failed", "next_mode"), [(Mode.LAZY, Mode.NORMAL), (Mode.NORMAL, Mode.COLD), (Mode.COLD, Mode.LAZY)]
)
def test_after_a_failed_start_the_next_slower_mode_is_tried_and_after_the_slowest_all_again(failed, next_mode):
    memory = instance(
        "i-x", "a", State.GONE, ALONE, desired=Desired.READY, members=(), remembered=True, mode=failed,
        failure=Failure("no zygote", 5.0), failed_at=90.0,
    )  # fmt: skip
    start = started(made([ready(), memory], [slot("a"), slot("b")]))
    assert start.mode is next_mode
    if next_mode is not Mode.LAZY:
        told = next(p.reason for p in start.prices if p.mode is failed)
        assert told == f"i-x failed by {failed}: no zygote"


@pytest.mark.parametrize(
    ("mode", "taken"), [(Mode.AUTO, Mode.NORMAL), (Mode.LAZY, Mode.NORMAL), (Mode.COLD, Mode.COLD)]
)
def test_a_guardian_is_started_warm_and_cold_only_by_name(mode, taken):
    spec = dataclasses.replace(ALONE, replicas=0, guardians=Guardians(1, 2), mode=mode)
    start = started(made([], [slot("a")], spec))
    assert (start.desired, start.mode) == (Desired.DORMANT, taken)
    assert [p.mode for p in start.prices] == [Mode.NORMAL, Mode.COLD]
    assert all("sleep" in p.parts for p in start.prices)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"args": ("--dtype", "float32")}, "args: "),
        ({"env": {"SECRET": "hidden"}}, "env: SECRET differ"),
        ({"engine": "other"}, "engine: "),
        ({"devices_per_member": 2}, "devices_per_member: 1 here, 2 there"),
        ({"revision": "r0"}, "content.revision: "),
    ],
)
def test_a_source_that_was_started_otherwise_is_not_offered_to_a_start(source, told):
    other = instance("i-a", "a", State.READY, dataclasses.replace(ALONE, **source))
    start = started(made([other], [slot("a"), slot("b")]))
    assert kinds(start) == [RungKind.DISK]
    assert told in start.reason
    assert "hidden" not in start.reason


def test_a_source_on_another_kind_of_device_or_engine_version_is_not_offered_to_a_start():
    other = dataclasses.replace(slot("b"), devices=(DeviceReport("d0", "gpu", "d0", 1 << 30, 0),))
    start = started(made([ready()], [slot("a"), other]))
    assert kinds(start) == [RungKind.DISK]
    assert "layout.device: gpu here, cpu there" in start.reason
    newer = dataclasses.replace(slot("b"), engines={"stub": "2"})
    start = started(made([ready()], [slot("a"), newer]))
    assert "layout.engine: stub '2' here, '1' there" in start.reason


def test_a_start_is_priced_by_what_its_first_rung_took_before():
    measured = {
        (SPEC.key, "lazy/peer_shm", "cpu"): Measured(3.0, {"fork": 1.0, "pull": 2.0}, 4),
        (SPEC.key, "lazy/disk", "cpu"): Measured(30.0, {"read": 30.0}, 4),
    }
    start = started(made([ready()], [slot("a"), slot("b")], measured=measured))
    assert start.predicted_seconds == 3.0
    assert start.prices[1].parts == {"fork": 1.0, "pull": 2.0}
    assert start.prices[1].measured
    assert started(made([], [slot("a", devices=(DEVICE,))], measured=measured)).predicted_seconds == 30.0
