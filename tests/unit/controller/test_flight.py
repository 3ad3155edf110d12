"""The flight recorder: what starts teach, what became slower, why a start was so, and what leaves in which format."""

import asyncio
import dataclasses
import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.controller.flight.compare import compare
from relight.controller.flight.explain import explain
from relight.controller.flight.predict import learn, recent_median
from relight.controller.flight.push import KEPT, Pusher
from relight.controller.flight.timeline import Expectation, assemble, name_of
from relight.controller.flight.traces import chrome, otlp
from relight.controller.metrics import Metrics
from relight.core.fingerprint import Fingerprint
from relight.core.records import Mode, Phase, RungKind, RungResult, StartRecord
from support.timelines import PRINT, start

SLOWER = (("fork", 1.0), ("pull", 3.0), ("warm", 1.02))


def test_a_start_names_the_phases_that_regressed_against_the_last_good_one_like_it():
    first, failed, slow = start(0), start(1, ok=False), start(2, phases=SLOWER)
    told = compare(slow, [slow, first, failed])
    assert told.baseline == first.id
    assert [p.name for p in told.phases if p.regressed] == ["pull"]
    pull = next(p for p in told.phases if p.name == "pull")
    assert (pull.before_seconds, pull.seconds, pull.change_seconds) == (2.0, 3.0, 1.0)


def test_a_phase_must_grow_by_a_share_and_by_a_time_to_have_regressed():
    quick = start(0, phases=(("a", 0.01), ("b", 10.0)))
    later = start(1, phases=(("a", 0.04), ("b", 11.0)))
    assert not any(p.regressed for p in compare(later, [quick]).phases)
    worst = start(2, phases=(("a", 0.07), ("b", 13.0)))
    assert [p.name for p in compare(worst, [quick]).phases if p.regressed] == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        start(0, fingerprint=Fingerprint(layout={"dtype": "fp8"})),
        start(0, mode=Mode.NORMAL),
        start(0, rungs=(RungResult(RungKind.DISK, True, "", 2.0),)),
        start(0, device_kind="gpu"),
        start(0, model="default/other"),
        start(0, phases=(("fork", 1.0), ("sleep", 1.0))),
        start(5),
    ],
)
def test_a_start_of_another_fingerprint_mode_way_or_device_or_a_later_one_is_no_baseline(other):
    told = compare(start(2), [other])
    assert told.baseline == ""
    assert "no earlier good start of this fingerprint by lazy (lazy/peer_shm)" in told.why


def test_a_start_without_a_fingerprint_is_compared_with_nothing():
    assert compare(start(1, fingerprint=None), [start(0)]).why == "its engine told no fingerprint"


def test_a_timeline_keeps_the_fields_of_its_fingerprint_and_their_digest():
    timeline = start()
    assert timeline.fingerprint == PRINT
    assert re.fullmatch(r"[0-9a-f]{32}", timeline.fingerprint_digest)
    assert timeline.fingerprint_digest != name_of(dataclasses.replace(PRINT, runtime={"tokenizer": "t2"}))


def test_an_expectation_of_another_operation_is_not_that_of_this_start():
    record = StartRecord("i-1", 1, "default/m", Mode.LAZY, "op-2", 1.0, 2.0, True, "")
    expectation = Expectation("i-1", "op-1", Mode.NORMAL, "why", 9.0, 0.5)
    assert assemble(record, None, expectation=expectation).predicted_seconds is None


def test_lazy_normal_and_cold_starts_teach_apart_and_by_their_rung():
    learnt = learn([start(0), start(1, mode=Mode.NORMAL, phases=(("engine", 7.0),)), start(2, mode=Mode.COLD)])
    assert {way for _, way, _ in learnt.measured} == {"lazy/peer_shm", "normal/peer_shm", "cold"}
    assert learnt.predict("default/m", "normal/peer_shm", "cpu", 0).seconds == 7.0


def test_what_was_measured_by_another_rung_is_used_with_the_bytes_of_this_one():
    found = learn([start(0)]).predict("default/m", "lazy/peer_tcp", "cpu", 1_000_000_000)
    # Two of the four seconds were the rung's.
    assert found.parts == {"fixed": 2.0, "weights": 1.0}
    assert found.measured
    assert "other rungs" in found.basis


def test_a_model_that_never_started_is_expected_as_others_are_with_its_own_bytes():
    found = learn([start(0)]).predict("default/large", "lazy/peer_shm", "cpu", 4_000_000)
    assert found.parts == {"fixed": 2.0, "weights": 4.0}
    assert not found.measured
    assert "other models" in found.basis
    assert "prior" in learn([start(0)]).predict("default/large", "lazy/peer_shm", "gpu", 4_000_000).basis


def test_a_guardians_start_teaches_what_a_start_takes_and_what_falling_asleep_takes():
    phases = (("engine", 5.0), ("sleep", 2.0))
    learnt = learn([start(0, mode=Mode.NORMAL, phases=phases)])
    assert learnt.predict("default/m", "normal/peer_shm", "cpu", 0).seconds == 5.0
    assert learnt.predict("default/m", "sleep", "cpu", 0).seconds == 2.0


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=30))
def test_a_recent_median_is_one_of_the_values_and_half_of_the_weight_lies_on_each_side(values):
    found = recent_median(values)
    assert found in values
    weights = [0.5 ** ((len(values) - 1 - n) / 3.0) for n in range(len(values))]
    assert sum(w for v, w in zip(values, weights, strict=True) if v <= found) >= sum(weights) / 2 - 1e-9
    assert sum(w for v, w in zip(values, weights, strict=True) if v >= found) >= sum(weights) / 2 - 1e-9


def test_predictions_are_within_a_fifth_by_the_fourth_start_though_the_first_was_slow():
    seconds = [30.0, 6.0, 6.5, 5.8, 6.2]
    starts = [start(n, phases=(("engine", s),)) for n, s in enumerate(seconds)]
    for known in (3, 4):
        predicted = learn(starts[:known]).predict("default/m", "lazy/peer_shm", "cpu", 0).seconds
        assert abs(predicted - seconds[known]) / seconds[known] <= 0.2


def test_an_explanation_has_every_mode_with_its_price_and_what_it_took():
    timeline = start(3, expected=5.0)
    told = explain(timeline, [start(0, mode=Mode.NORMAL, phases=(("engine", 6.0),)), timeline])
    assert [m.mode for m in told.modes] == [Mode.GUARDIAN, Mode.LAZY, Mode.NORMAL, Mode.COLD]
    guardian, lazy, normal, cold = told.modes
    assert (guardian.fits, guardian.predicted_seconds, guardian.measured_seconds) == (False, None, None)
    assert (lazy.chosen, lazy.predicted_seconds, lazy.measured_seconds, lazy.starts) == (True, 4.0, 4.0, 1)
    assert (normal.from_measurement, normal.measured_seconds) == (True, 6.0)
    assert (cold.predicted_seconds, cold.measured_seconds) == (60.0, None)
    assert told.prediction_error == 0.25
    assert told.process == "forked from the zygote of vllm"
    assert told.why == "lazy in 4.000 s, the fastest that fits"


def test_chrome_events_have_what_a_viewer_requires_and_never_overlap_on_a_thread():
    overlapping = start(1)
    phases = (*overlapping.phases, Phase("prefetch", overlapping.begun_at + 0.5, overlapping.begun_at + 2.5, "x"))
    document = json.loads(json.dumps(chrome([start(0), dataclasses.replace(overlapping, phases=phases)])))
    assert document["displayTimeUnit"] == "ms"
    busy = {}
    for event in document["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert event["ph"] in "XMi"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            key = (event["pid"], event["tid"])
            assert event["ts"] >= busy.get(key, 0)
            busy[key] = event["ts"] + event["dur"]
    assert {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"} >= {"phases 2"}
    assert len({e["pid"] for e in document["traceEvents"]}) == 2


def spans_of(document):
    (resource,) = document["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "relight-controller"}} in resource["resource"]["attributes"]
    (scope,) = resource["scopeSpans"]
    assert scope["scope"]["name"]
    return scope["spans"]


def check_otlp(document):
    """As the JSON encoding of opentelemetry-proto has it."""
    spans = spans_of(json.loads(json.dumps(document)))
    known = {(s["traceId"], s["spanId"]) for s in spans}
    assert len(known) == len(spans)
    for span in spans:
        assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"])
        assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"])
        assert span["parentSpanId"] == "" or (span["traceId"], span["parentSpanId"]) in known
        assert isinstance(span["kind"], int)
        begin, end = span["startTimeUnixNano"], span["endTimeUnixNano"]
        assert re.fullmatch(r"\d+", begin)
        assert re.fullmatch(r"\d+", end)
        assert int(begin) <= int(end)
        root = next(s for s in spans if s["spanId"] == span["parentSpanId"]) if span["parentSpanId"] else span
        assert int(root["startTimeUnixNano"]) <= int(begin)
        assert int(end) <= int(root["endTimeUnixNano"])
        for event in span["events"]:
            assert int(begin) <= int(event["timeUnixNano"]) <= int(end)
        for attribute in [*span["attributes"], *(a for e in span["events"] for a in e["attributes"])]:
            (kind,) = attribute["value"]
            assert kind in ("stringValue", "boolValue", "intValue", "doubleValue")
            if kind == "intValue":
                assert re.fullmatch(r"-?\d+", attribute["value"][kind])
    return spans


def test_otlp_spans_are_one_trace_per_operation_with_phases_below_the_start_and_rungs_as_events():
    one, other = start(0, operation="op-1"), start(1, operation="op-1", ok=False, reason="no memory")
    spans = check_otlp(otlp([one, other, start(2)]))
    assert len({s["traceId"] for s in spans}) == 2
    roots = [s for s in spans if not s["parentSpanId"]]
    assert [s["status"].get("code") for s in roots] == [1, 2, 1]
    assert roots[1]["status"]["message"] == "no memory"
    assert [s["name"] for s in spans if s["parentSpanId"] == roots[0]["spanId"]] == ["fork", "pull", "warm"]
    assert [e["name"] for e in roots[0]["events"]] == ["rung peer_shm"]
    assert otlp([one]) == otlp([one])


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0.0, 5.0)), max_size=6))
def test_any_phases_make_valid_spans(phases):
    check_otlp(otlp([start(0, phases=tuple(phases))]))


async def pushed(answer, count=1):
    """What a collector that answers so was sent, and what was counted."""
    seen, counted, all_counted = [], [], asyncio.Event()

    def handler(request):
        seen.append(request)
        return answer(request)

    def count_one(outcome):
        counted.append(outcome)
        if len(counted) == count:
            all_counted.set()

    pusher = Pusher("http://u:secret@collector:4318/", count_one, httpx.MockTransport(handler))
    for number in range(count):
        pusher.offer(start(number))
    task = asyncio.create_task(pusher.run())
    async with asyncio.timeout(10):
        await all_counted.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return seen, counted


async def test_a_finished_start_is_posted_to_the_collector():
    (request,), counted = await pushed(lambda _: httpx.Response(200, json={}))
    assert (request.method, request.url.path) == ("POST", "/v1/traces")
    assert request.headers["content-type"] == "application/json"
    check_otlp(json.loads(request.content))
    assert counted == ["sent"]


def away(request):
    raise httpx.ConnectError("no route", request=request)


@pytest.mark.parametrize("answer", [away, lambda _: httpx.Response(503), lambda _: httpx.Response(404)])
async def test_a_collector_that_fails_is_counted_and_asked_again_with_the_next_start(answer, capsys):
    seen, counted = await pushed(answer, count=2)
    assert (len(seen), counted) == (2, ["failed", "failed"])
    told = capsys.readouterr()
    assert "secret" not in told.out + told.err


def test_starts_beyond_what_a_slow_collector_leaves_room_for_are_dropped_and_counted():
    counted = []
    pusher = Pusher("http://collector:4318/v1/traces", counted.append)
    assert pusher.url == "http://collector:4318/v1/traces"
    timeline = start()
    for _ in range(KEPT + 2):
        pusher.offer(timeline)
    assert counted == ["dropped", "dropped"]


def test_starts_are_measured_by_mode_and_phase_by_mode_and_way_and_by_their_predictions_error():
    metrics = Metrics()
    metrics.started(start(0, expected=5.0))
    metrics.started(start(1, ok=False))
    metrics.control.pushed("failed")
    text = metrics.text().decode()
    for series in (
        'relight_start_phase_seconds_count{mode="lazy",phase="pull"} 2.0',
        'relight_start_seconds_count{mode="lazy",model="default/m",outcome="ok",way="lazy/peer_shm"} 1.0',
        'relight_start_prediction_error_ratio_sum{mode="lazy",way="lazy/peer_shm"} 0.25',
        'relight_start_prediction_error_ratio_count{mode="lazy",way="lazy/peer_shm"} 1.0',
        'relight_trace_exports_total{outcome="failed"} 1.0',
    ):
        assert series in text, text
