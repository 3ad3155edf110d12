"""Timelines: what is covered, what each component adds, and what is learnt from them."""

from hypothesis import given
from hypothesis import strategies as st

from relight.controller.flight.predict import learn
from relight.controller.flight.timeline import assemble, coverage, with_span
from relight.controller.metrics import Metrics
from relight.controller.observe.look import Look
from relight.core.records import (
    CacheReport,
    GatewaySpan,
    Mode,
    Operation,
    OperationState,
    Phase,
    RungKind,
    RungResult,
    SlotView,
    Snapshot,
    StartRecord,
)

TIMES = st.integers(0, 20)
PHASES = st.lists(st.builds(lambda a, b: Phase("p", min(a, b), max(a, b)), TIMES, TIMES), max_size=6)


@given(PHASES, TIMES, TIMES)
def test_coverage_is_the_share_of_unit_steps_that_lie_in_a_phase(phases, start, end):
    steps = range(start, end)
    if not steps:
        assert coverage(phases, start, end) == 1.0
        return
    inside = sum(any(p.start <= step and step + 1 <= p.end for p in phases) for step in steps)
    assert abs(coverage(phases, start, end) - inside / len(steps)) < 1e-9


def record(**changes):
    values = {
        "instance": "i-1",
        "incarnation": 3,
        "model": "default/m",
        "mode": Mode.GUARDIAN,
        "operation": "op-1",
        "begun_at": 10.3,
        "ended_at": 10.6,
        "ok": True,
        "reason": "",
        "rungs": (
            RungResult(RungKind.PEER_SHM, False, "tensor a differs", 0.1),
            RungResult(RungKind.PEER_TCP, True, "", 0.1),
        ),
        "phases": (Phase("pull", 10.3, 10.5), Phase("canary", 10.5, 10.6)),
    }
    return StartRecord(**{**values, **changes})


def operation(*phases):
    return Operation("op-1", "scale", "default/m", "ada", OperationState.RUNNING, "", 10.0, 1, 2, phases=phases)


def test_the_control_planes_phases_join_the_agents_without_a_gap():
    asked = operation(
        Phase("accept", 10.0, 10.1),
        Phase("decide", 10.1, 10.2, "i-1"),
        Phase("decide", 10.1, 10.25, "i-2"),
    )
    timeline = assemble(record(), asked, device_kind="cpu")
    assert [p.name for p in timeline.phases] == ["accept", "decide", "dispatch", "pull", "canary"]
    assert coverage(timeline.phases, 10.0, 10.6) == 1.0
    assert timeline.way == "peer_tcp"
    assert abs(timeline.seconds - 0.4) < 1e-9


def test_a_start_without_a_known_operation_has_the_agents_phases_alone():
    assert [p.name for p in assemble(record(), None).phases] == ["pull", "canary"]


def test_a_gateways_span_is_added_once():
    timeline = assemble(record(), None)
    for _ in range(2):
        timeline = with_span(timeline, GatewaySpan("i-1", 3, "first_token", 10.6, 10.7))
    assert [p.name for p in timeline.phases] == ["pull", "canary", "first_token"]
    broken = with_span(timeline, GatewaySpan("i-1", 3, "route", float("nan"), 1.0))
    assert broken == timeline


def test_predictions_are_the_median_of_good_starts_and_a_prior_before():
    prior = learn([]).predict("default/m", "peer_tcp", "cpu", 1_000_000_000)
    assert "prior" in prior.basis
    starts = [
        assemble(record(ended_at=10.6 + n, incarnation=n, ok=n != 9), None, device_kind="cpu") for n in (0, 1, 2, 9)
    ]
    learnt = learn(starts).predict("default/m", "peer_tcp", "cpu", 0)
    assert abs(learnt.seconds - 1.3) < 1e-6
    assert learnt.basis == "median of 3 measured"
    assert set(learnt.parts) == {"pull", "canary"}


def test_numbers_of_a_cache_node_are_counted_on_over_its_agents_restart():
    def seen(hits, alive=True):
        cache = CacheReport("tcp:h:1", "0" * 64, bundles=2, bytes=10, quota=20, hits=hits)
        return Snapshot(0.0, 1, 1, (), (SlotView("a", alive, "", False, {}, (), cache=cache),), ())

    metrics = Metrics()
    for hits in (3, 3, 5, 1):
        metrics.seen(Look(seen(hits)))
    text = metrics.text().decode()
    assert 'relight_cache_starts_total{outcome="hit",slot="a"} 6.0' in text
    assert 'relight_cache_bundles{slot="a"} 2.0' in text
    metrics.seen(Look(seen(1, alive=False)))
    assert 'relight_cache_bundles{slot="a"}' not in metrics.text().decode()


def test_a_path_that_is_slower_than_expected_is_counted_by_what_was_expected():
    metrics = Metrics()
    slow = RungResult(RungKind.PEER_TCP, True, "", 0.1, instead_of="peer_rdma: b: mlx5_0: port 1 is DOWN")
    for rungs in ((slow,), (RungResult(RungKind.PEER_TCP, True, "", 0.1),)):
        metrics.started(assemble(record(rungs=rungs), None))
    series = [line for line in metrics.text().decode().splitlines() if line.startswith("relight_slow_path_total{")]
    assert series == ['relight_slow_path_total{expected="peer_rdma",model="default/m",taken="peer_tcp"} 1.0']
