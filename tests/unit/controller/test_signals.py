"""What autoscalers are told: unknown is never zero, and a ratio counts replicas that are ready."""

import math

import pytest

from relight.controller.autoscale.signals import Board, Counts, Metric, Reading
from relight.controller.metrics import Metrics
from relight.controller.observe.look import Look
from relight.core.records import Demand, ModelSpec, ModelView, Plan, Scaling, Snapshot
from relight.core.states import State
from support.planning import SPEC, instance, slot

BY_LOAD = (Metric.DEMAND, Metric.HELD, Metric.IN_FLIGHT, Metric.TARGET, Metric.RATIO)
MODEL = ModelSpec("default", "m", "/m", "r", "stub", min_replicas=1, max_replicas=5, scaling=Scaling(4))


@pytest.mark.parametrize("demand", [None, Demand(-1, 0, 0, 0), Demand(math.nan, 0, 0, 0), Demand(0, 0, math.inf, 0)])
def test_what_no_gateway_counts_is_unknown(demand):
    reading = Reading(MODEL, demand, Counts(2, 1))
    assert [reading.value(m) for m in BY_LOAD] == [None] * len(BY_LOAD)
    assert (reading.value(Metric.CURRENT), reading.value(Metric.READY)) == (2, 1)


def test_replicas_are_unknown_until_every_slot_was_heard_of():
    reading = Reading(MODEL, Demand(9, 0, 0, 0), None)
    assert [reading.value(m) for m in (Metric.CURRENT, Metric.READY, Metric.RATIO)] == [None] * 3
    assert reading.value(Metric.TARGET) == 3


@pytest.mark.parametrize(("requests", "target"), [(0, 1), (1, 1), (4, 1), (5, 2), (17, 5), (10**6, 5)])
def test_the_target_is_what_the_load_asks_for_within_bounds(requests, target):
    reading = Reading(MODEL, Demand(requests, 0, 0, 0), Counts(2, 2))
    assert (reading.value(Metric.TARGET), reading.value(Metric.RATIO)) == (target, target / 2)


def looked(synced=True, demand=None):
    here = (instance("i-1", "a", State.READY), instance("i-2", "b", State.DORMANT))
    views = (ModelView(SPEC, demand),)
    return Snapshot(1.0, 1, 1, views, (slot("a"), slot("b")), here, synced)


def test_a_board_shows_replicas_as_looked_at_and_demand_as_of_now():
    demand = {"default/m": Demand(9, 0, 0, 0)}
    board = Board(demand.get)
    assert board.reading("default/m") is None
    board.passed(looked(), Plan(1, (), ()))
    (reading,) = board.readings("default")
    assert (reading.value(Metric.DEMAND), reading.value(Metric.READY), board.readings("other")) == (9, 1, [])
    del demand["default/m"]
    assert board.reading("default/m").value(Metric.DEMAND) is None
    board.passed(looked(synced=False), Plan(2, (), ()))
    assert board.reading("default/m").value(Metric.READY) is None


def test_prometheus_has_no_series_of_what_is_unknown():
    metrics = Metrics()
    metrics.seen(Look(looked(demand=Demand(9, 0, 0, 0))))
    assert b'relight_target_ratio{model="default/m"} 2.0' in metrics.text()
    metrics.seen(Look(looked()))
    assert b"relight_target_ratio{" not in metrics.text()
    assert b'relight_current_replicas{model="default/m"} 1.0' in metrics.text()
