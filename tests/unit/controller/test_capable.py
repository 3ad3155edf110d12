"""Where a capability is missing or unknown, the next slower way is taken and the reason kept."""

import dataclasses

import pytest

from relight.controller.decide.replicas import decide
from relight.controller.plan.plan import plan
from relight.controller.plan.prices import Predictions
from relight.core.records import Capability, Demand, Desired, Guardians, Mode, ModelView, Snapshot, Verdict
from relight.core.states import State
from support.planning import SPEC, instance, slot

NOW = 1000.0


def _planned(spec, *capabilities, instances=()):
    slots = tuple(dataclasses.replace(slot(n), capabilities=capabilities if n == "a" else ()) for n in ("a",))
    snapshot = Snapshot(NOW, 1, 1, (ModelView(spec, Demand(0, 0.0, 0, None)),), slots, instances)
    return plan(snapshot, decide(snapshot), Predictions(), lambda prefix: f"{prefix}-1")


def _model(mode=Mode.AUTO, replicas=1, guardians=0):
    return dataclasses.replace(SPEC, mode=mode, replicas=replicas, guardians=Guardians(guardians, 2))


def _lazy(verdict, ranks=0):
    return Capability("stub", "lazy", verdict, "graph start failed with 8 cards", ranks)


@pytest.mark.parametrize(
    ("mode", "verdict", "taken"),
    [
        (Mode.AUTO, Verdict.YES, Mode.LAZY),
        (Mode.AUTO, Verdict.UNKNOWN, Mode.NORMAL),
        (Mode.AUTO, Verdict.NO, Mode.NORMAL),
        (Mode.GUARDIAN, Verdict.UNKNOWN, Mode.NORMAL),
        (Mode.GUARDIAN, Verdict.YES, Mode.LAZY),
        (Mode.LAZY, Verdict.UNKNOWN, Mode.LAZY),
        (Mode.LAZY, Verdict.NO, Mode.NORMAL),
        (Mode.NORMAL, Verdict.NO, Mode.NORMAL),
    ],
)
def test_lazy_gives_way_where_it_cannot_be_and_where_nobody_named_it_and_it_is_unknown(mode, verdict, taken):
    (placed,) = _planned(_model(mode), _lazy(verdict)).placements
    assert placed.mode is taken
    price = next(p for p in placed.prices if p.mode is Mode.LAZY)
    if taken is Mode.NORMAL:
        assert not price.fits
        assert "graph start failed with 8 cards" in price.reason
    if (mode, taken) == (Mode.LAZY, Mode.NORMAL):
        assert "lazy is asked for and does not fit" in placed.reason


def test_a_slot_that_tells_nothing_closes_nothing():
    (placed,) = _planned(_model()).placements
    assert placed.mode is Mode.LAZY


def test_what_failed_with_eight_devices_says_nothing_of_one():
    (placed,) = _planned(_model(), _lazy(Verdict.YES), _lazy(Verdict.NO, ranks=8)).placements
    assert placed.mode is Mode.LAZY
    (placed,) = _planned(_model(), _lazy(Verdict.YES), _lazy(Verdict.NO, ranks=1)).placements
    assert placed.mode is Mode.NORMAL


@pytest.mark.parametrize(("verdict", "made"), [(Verdict.YES, True), (Verdict.UNKNOWN, True), (Verdict.NO, False)])
def test_no_guardian_is_made_where_its_engine_cannot_sleep_and_the_reason_is_told(verdict, made):
    known = Capability("stub", "sleep_2", verdict, "XPU error -707 twice")
    planned = _planned(_model(replicas=0, guardians=1), known)
    assert bool([p for p in planned.placements if p.desired is Desired.DORMANT]) is made
    assert made or "cannot sleep at level 2 (XPU error -707 twice)" in planned.unplaced[0]


def test_another_level_of_sleep_is_another_capability():
    known = Capability("stub", "sleep_1", Verdict.NO, "no host memory")
    assert _planned(_model(replicas=0, guardians=1), known).placements


@pytest.mark.parametrize(("verdict", "after"), [(Verdict.UNKNOWN, Desired.DORMANT), (Verdict.NO, Desired.GONE)])
def test_a_drained_replica_is_not_put_to_sleep_where_its_engine_cannot(verdict, after):
    known = Capability("stub", "sleep_2", verdict, "XPU error -707 twice")
    spec = _model(replicas=0, guardians=1)
    drained = instance("i-a", "a", State.READY, spec, desired=Desired.DRAINED, drained=True)
    placed = next(p for p in _planned(spec, known, instances=(drained,)).placements if p.instance == "i-a")
    assert placed.desired is after
    assert verdict is not Verdict.NO or "cannot sleep at level 2 (XPU error -707 twice)" in placed.reason
