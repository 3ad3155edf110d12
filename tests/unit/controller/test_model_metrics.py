"""What is counted of models, slots and the control plane, from what one pass of the loop saw and did."""

from dataclasses import replace

import pytest

from relight.controller.flight.timeline import Expectation
from relight.controller.metrics import Metrics
from relight.controller.observe.look import Look
from relight.controller.state.base import Write
from relight.controller.state.timed import TimedStore
from relight.core.clock import SystemClock
from relight.core.errors import Conflict, Unavailable
from relight.core.records import (
    Decision,
    Desired,
    Failure,
    Mode,
    ModelView,
    Placement,
    Snapshot,
)
from relight.core.states import State
from support.planning import SPEC, instance, slot

KEY = "default/m"


def sample(metrics, name, **labels):
    """The value of one series; None when there is none."""
    found = [
        s.value
        for family in metrics.registry.collect()
        for s in family.samples
        if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())
    ]
    return found[0] if found else None


def looked(*instances, now=100.0, slots=(), replicas=1, placed=(), expected=(), synced=True, spec=SPEC):
    snapshot = Snapshot(now, 1, 7, (ModelView(spec, None),), slots or (slot("a"), slot("b")), instances, synced)
    decided = (Decision(KEY, replicas, spec.guardians.replicas, ""),)
    return Look(snapshot, decided, placed, {e.instance: e for e in expected})


def placement(mode, predicted=1.0, desired=Desired.READY):
    return Placement("i-9", KEY, desired, mode, 2, ("a",), (("d0",),), (), "", predicted)


READY, ASLEEP = instance("i-1", "a", State.READY), instance("i-2", "b", State.DORMANT)


def test_a_woken_guardian_is_a_hit_a_started_engine_a_miss_and_the_very_first_neither():
    metrics = Metrics()
    metrics.seen(looked(placed=(placement(Mode.COLD),)))
    assert sample(metrics, "relight_guardian_requests_total", outcome="miss") == 0
    metrics.seen(looked(READY))
    placed = (placement(Mode.GUARDIAN), placement(Mode.GUARDIAN), placement(Mode.LAZY))
    metrics.seen(looked(READY, placed=placed))
    assert sample(metrics, "relight_guardian_requests_total", outcome="hit") == 2
    assert sample(metrics, "relight_guardian_requests_total", outcome="miss") == 1
    assert sample(metrics, "relight_modes_total", asked="auto", taken="lazy") == 1


def test_a_replica_that_is_wanted_back_while_it_drains_and_a_guardians_start_are_neither_hit_nor_miss():
    metrics = Metrics()
    metrics.seen(looked(READY))
    back, guardian = placement(Mode.LAZY, predicted=None), placement(Mode.LAZY, desired=Desired.DORMANT)
    metrics.seen(looked(READY, placed=(back, guardian)))
    assert sample(metrics, "relight_guardian_requests_total", outcome="miss") == 0
    assert sample(metrics, "relight_modes_total") is None
    assert sample(metrics, "relight_placements_total", desired="dormant") == 1


def test_since_when_replicas_are_missing_is_kept_until_none_is():
    metrics = Metrics()
    name = "relight_short_since_timestamp_seconds"
    metrics.seen(looked(READY, replicas=2, now=100.0))
    metrics.seen(looked(READY, replicas=2, now=130.0))
    assert sample(metrics, name, model=KEY) == 100.0
    # While slots are not heard of, what was known stands.
    metrics.seen(looked(replicas=2, now=140.0, synced=False))
    assert sample(metrics, name, model=KEY) == 100.0
    metrics.seen(looked(READY, replicas=1, now=150.0))
    assert sample(metrics, name, model=KEY) is None


def test_expected_times_are_of_what_is_on_its_way():
    waking = replace(instance("i-3", "b", State.WAKING), desired=Desired.READY)
    told = replace(instance("i-4", "b", State.DORMANT), desired=Desired.READY)
    expected = [Expectation(i, "", Mode.GUARDIAN, "", s, 90.0) for i, s in (("i-1", 99.0), ("i-3", 4.0), ("i-4", 20.0))]
    metrics = Metrics()
    metrics.seen(looked(READY, waking, told, expected=expected))
    assert sample(metrics, "relight_ready_expected_timestamp_seconds", model=KEY) == 94.0
    assert sample(metrics, "relight_start_predicted_seconds", model=KEY) == 20.0
    metrics.seen(looked(READY, ASLEEP, expected=expected))
    assert sample(metrics, "relight_start_predicted_seconds", model=KEY) is None


def test_sources_and_guardians_are_counted_down_to_none():
    metrics = Metrics()
    metrics.seen(looked(READY, ASLEEP))
    assert sample(metrics, "relight_sources", kind="peer") == 1
    assert sample(metrics, "relight_guardians", level="2") == 1
    metrics.seen(looked())
    assert sample(metrics, "relight_sources", kind="peer") == 0
    assert sample(metrics, "relight_sources", kind="host_copy") == 0
    assert sample(metrics, "relight_guardians", level="2") == 0
    assert sample(metrics, "relight_desired_guardians", level="2") == 1


def test_a_failure_is_counted_once_however_often_it_is_seen():
    metrics = Metrics()
    failed = replace(READY, state=State.FAILED, failure=Failure("it died"), failed_at=5.0)
    for each in (failed, failed, replace(failed, failed_at=9.0)):
        metrics.seen(looked(each))
    assert sample(metrics, "relight_instance_failures_total", model=KEY, desired="ready") == 2


def test_what_failed_under_an_earlier_controller_is_not_counted_again():
    metrics = Metrics()
    old = replace(READY, state=State.GONE, failure=Failure("it died"), failed_at=5.0, remembered=True)
    metrics.seen(looked(old))
    metrics.seen(looked(old))
    assert sample(metrics, "relight_instance_failures_total") is None
    metrics.seen(looked(old, replace(old, instance="i-7", failed_at=8.0)))
    assert sample(metrics, "relight_instance_failures_total", model=KEY) == 1


def test_slots_are_alive_awaited_lost_or_gone():
    alive, gone = slot("a"), replace(slot("d"), alive=False)
    awaited, lost = replace(slot("b"), boot_id=""), replace(slot("c"), alive=False)
    metrics = Metrics()
    metrics.seen(looked(instance("i-5", "c", State.READY), slots=(alive, awaited, lost, gone)))
    assert {s: sample(metrics, "relight_slots", state=s) for s in ("alive", "awaited", "lost", "gone")} == {
        "alive": 1, "awaited": 1, "lost": 1, "gone": 1,
    }  # fmt: skip


def test_who_is_behind_is_told():
    metrics = Metrics()
    metrics.seen(replace(looked(), slots_behind=2, gateways=3, gateways_behind=1))
    assert sample(metrics, "relight_slots_behind") == 2
    assert sample(metrics, "relight_gateways", current="true") == 2
    assert sample(metrics, "relight_gateways", current="false") == 1
    assert sample(metrics, "relight_epoch") == 7


def test_openmetrics_is_spoken_where_it_is_asked_for():
    metrics = Metrics()
    text, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert metrics.exposition("")[1].startswith("text/plain")


class Broken:
    """A store whose commits end as they are told to."""

    def __init__(self, error):
        self.error = error

    async def commit(self, writes, *, expect=None, fence=None):
        if self.error:
            raise self.error
        return 5


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "ok"), (Conflict("moved"), "conflict"), (Unavailable("away"), "failed")]
)
async def test_calls_of_the_store_are_timed_however_they_end(error, outcome):
    told = []
    store = TimedStore(Broken(error), lambda *call: told.append(call), SystemClock())
    if error is None:
        assert await store.commit([Write("k", b"v")]) == 5
    else:
        with pytest.raises(type(error)):
            await store.commit([])
    ((operation, ended, seconds),) = told
    assert (operation, ended) == ("commit", outcome)
    assert seconds >= 0
