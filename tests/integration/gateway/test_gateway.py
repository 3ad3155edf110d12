"""Requests reach ready replicas only, are held while none is, and are never answered twice."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from relight.agent.engines.stub_server import token
from relight.core.records import GatewayReport
from support.gateway import DEADLINE, OPERATOR, VIEWER, Door, Engine, Routing, model

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
SPELLINGS = (
    "/sleep", "/v1/sleep", "/v1/../sleep", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/load_lora",
    "/v1/completions/%2e%2e/%2e%2e/sleep", "/collective_rpc", "/docs", "/openapi.json", "/", "/v1/completions;x",
    "/%73leep", "/v1%2fcompletions%00",
)  # fmt: skip
BAD_BODIES = (
    (b"", "body"),
    (b"{", "body"),
    (b"[]", "body"),
    (b"\xff\xfe", "body"),
    (b'{"prompt": "x"}', "model"),
    (b'{"model": 3}', "model"),
    (b'{"model": ""}', "model"),
    (b'{"model": null}', "model"),
    (b'{"model": "tiny", "stream": "yes"}', "stream"),
    (b'{"model": "tiny", "x": NaN}', "body"),
    (b"[" * 200_000, "body"),
)
TEXT = " ".join(token("hello", "r1", i) for i in range(4))


def _held(report: GatewayReport) -> int:
    return sum(m.held for m in report.models)


def _in_flight(report: GatewayReport) -> int:
    return sum(i.in_flight for i in report.instances)


async def _ask(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={**ASK, **changes}, headers=headers or {})


# ------------------------------------------------------------------------- names and routes


@pytest.mark.parametrize("name", ["tiny", "default/tiny", "alias"])
async def test_a_model_answers_to_each_of_its_names_and_says_the_one_that_was_asked(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any, name: str
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica(7)))
    answer = await _ask(client, model=name)
    assert answer.status_code == 200
    assert answer.json()["model"] == name
    assert answer.json()["choices"][0]["text"] == TEXT
    assert engine.bodies[-1]["model"] == "stub-i-a"
    assert answer.headers["x-relight-instance"] == "i-a"
    assert answer.headers["x-relight-incarnation"] == "7"


async def test_a_stream_is_passed_event_by_event_under_the_asked_name(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    async with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {e["model"] for e in events} == {"tiny"}
    assert "".join(e["choices"][0]["text"] for e in events).strip() == TEXT


async def test_chat_is_answered_too(client: httpx.AsyncClient, routing: Routing, make_engine: Any) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


async def test_the_known_models_are_listed_by_every_name(client: httpx.AsyncClient, routing: Routing) -> None:
    await routing.tell(model(), model(name="other", served_names=()))
    listed = (await client.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == ["alias", "default/other", "default/tiny", "other", "tiny"]
    assert (await client.get("/v1/models/default/tiny")).json()["id"] == "default/tiny"
    assert (await client.get("/v1/models/none")).status_code == 404


async def test_a_name_of_two_namespaces_is_refused_naming_both(client: httpx.AsyncClient, routing: Routing) -> None:
    await routing.tell(model(), model(namespace="team", served_names=()))
    answer = await _ask(client)
    assert answer.status_code == 400
    assert "default/tiny or team/tiny" in answer.json()["error"]["message"]


async def test_nothing_but_the_known_routes_is_there_in_any_spelling(
    door: Door, routing: Routing, make_engine: Any
) -> None:
    engine: Engine = await make_engine()
    await routing.tell(model(engine.replica()))
    host, port = door.url.removeprefix("http://").split(":")
    body = json.dumps(ASK)
    for method in ("GET", "POST"):
        for path in SPELLINGS:
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            answer = await reader.read()
            writer.close()
            assert b" 404 " in answer.split(b"\r\n")[0], path
            assert b'"error"' in answer, path
    assert engine.bodies == []


async def test_a_wrong_method_says_which_is_right(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert (await client.post("/v1/models")).headers["allow"] == "GET"


# ------------------------------------------------------------------------- bad input


async def test_a_bad_body_is_refused_naming_the_field(client: httpx.AsyncClient, routing: Routing) -> None:
    await routing.tell(model())
    for body, param in BAD_BODIES:
        answer = await client.post("/v1/completions", content=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, body[:40]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), body[:40]


async def test_a_huge_body_is_refused(make_door: Any, routing: Routing) -> None:
    door = await make_door(max_body_bytes=1024)
    await routing.tell(model())
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE) as client:
        answer = await _ask(client, prompt="x" * 2000)
    assert answer.status_code == 400
    assert "at most 1024 bytes" in answer.json()["error"]["message"]


async def test_an_unknown_model_is_404_and_wakes_nothing(client: httpx.AsyncClient, routing: Routing) -> None:
    await routing.tell(model())
    seen = len(routing.reports)
    answer = await _ask(client, model="nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    await routing.tell(model())
    assert all(_held(r) == 0 and not r.models for r in routing.reports[seen:])


async def test_before_any_routes_were_told_it_is_not_ready(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/readyz")).status_code == 503
    answer = await _ask(client)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


# ------------------------------------------------------------------------- holding


async def test_a_known_model_that_cannot_come_is_503_with_the_reason(
    client: httpx.AsyncClient, routing: Routing
) -> None:
    await routing.tell(model(can_come=False, reason="no free device"))
    answer = await _ask(client)
    assert answer.status_code == 503
    assert "no free device" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_held_requests_are_refused_once_nothing_can_come_any_more(
    client: httpx.AsyncClient, routing: Routing
) -> None:
    await routing.tell(model(coming=1))
    request = asyncio.create_task(_ask(client))
    await routing.until(lambda r: _held(r) == 1)
    await routing.tell(model(can_come=False, reason="the wake failed"))
    assert (await request).status_code == 503


async def test_fifty_requests_at_zero_replicas_are_one_demand_and_all_are_answered(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    await routing.tell(model())
    seen = len(routing.reports)
    requests = [asyncio.create_task(_ask(client)) for _ in range(50)]
    await routing.until(lambda r: _held(r) == 50)
    risen = [_held(r) for r in routing.reports[seen:]]
    assert risen == sorted(risen)
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    answers = await asyncio.gather(*requests)
    assert {a.status_code for a in answers} == {200}
    assert {a.json()["choices"][0]["text"] for a in answers} == {TEXT}
    await routing.until(lambda r: _held(r) == 0 and _in_flight(r) == 0, since=len(routing.reports) - 1)


async def test_the_first_held_request_goes_at_once_and_the_rest_follow_at_the_pace(
    make_door: Any, routing: Routing, make_engine: Any
) -> None:
    door = await make_door(hold={"release_per_second": 0.001})
    engine = await make_engine()
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE) as client:
        await routing.tell(model())
        requests = [asyncio.create_task(_ask(client)) for _ in range(3)]
        await routing.until(lambda r: _held(r) == 3)
        await routing.tell(model(engine.replica()))
        done, waiting = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        assert engine.stub.counts["started"] == 1
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_full_queue_answers_429_with_retry_after(make_door: Any, routing: Routing) -> None:
    door = await make_door(hold={"limit": 2})
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE) as client:
        await routing.tell(model(next_ready_seconds=7.0))
        requests = [asyncio.create_task(_ask(client)) for _ in range(2)]
        await routing.until(lambda r: _held(r) == 2)
        answer = await _ask(client)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def test_the_configured_hold_time_is_the_real_one(make_door: Any, routing: Routing) -> None:
    door = await make_door(hold={"seconds": 0.3})
    async with httpx.AsyncClient(base_url=door.url, timeout=DEADLINE) as client:
        await routing.tell(model())
        answer = await _ask(client)
    assert answer.status_code == 503
    assert "0.3 s" in answer.json()["error"]["message"]


async def test_what_is_held_is_refused_when_the_gateway_is_told_to_end(
    client: httpx.AsyncClient, door: Door, routing: Routing
) -> None:
    await routing.tell(model())
    request = asyncio.create_task(_ask(client))
    await routing.until(lambda r: _held(r) == 1)
    assert door.process is not None
    door.process.send_signal(signal.SIGTERM)
    assert (await request).status_code == 503
    async with asyncio.timeout(DEADLINE):
        assert await door.process.wait() == 0


# ------------------------------------------------------------------------- hanging up


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_request_at_the_engine(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any, stream: bool
) -> None:
    engine: Engine = await make_engine(token_delay=0.02)
    await routing.tell(model(engine.replica()))
    request = asyncio.create_task(_ask(client, stream=stream, max_tokens=10_000))
    await routing.until(lambda r: _in_flight(r) == 1)
    seen = len(routing.reports)
    request.cancel()
    await routing.until(lambda r: _in_flight(r) == 0 and all(m.in_flight == 0 for m in r.models), since=seen)
    await _reaches(lambda: engine.stub.counts["aborted"] == 1 and engine.stub.counts["running"] == 0)


async def test_a_client_that_hangs_up_while_held_is_no_demand_any_more(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    await routing.tell(model())
    request = asyncio.create_task(_ask(client))
    await routing.until(lambda r: _held(r) == 1)
    seen = len(routing.reports)
    request.cancel()
    await routing.until(lambda r: _held(r) == 0, since=seen)
    engine: Engine = await make_engine()
    await routing.tell(model(engine.replica()))
    assert engine.stub.counts["started"] == 0


# ------------------------------------------------------------------------- failures


async def test_a_server_error_is_tried_elsewhere_before_the_first_byte(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    bad, good = await make_engine("i-bad", fail_first=99), await make_engine("i-good")
    await routing.tell(model(bad.replica(), good.replica()))
    answers = [await _ask(client) for _ in range(4)]
    assert {a.status_code for a in answers} == {200}
    assert {a.headers["x-relight-instance"] for a in answers} == {"i-good"}
    assert bad.stub.counts["started"] > 0


async def test_a_server_error_of_the_only_replica_is_the_answer(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine(fail_first=1)
    await routing.tell(model(engine.replica()))
    assert (await _ask(client)).status_code == 500
    assert (await _ask(client)).status_code == 200


async def test_a_replica_that_cannot_be_reached_is_replaced_by_another(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    dead, good = await make_engine("i-dead"), await make_engine("i-good")
    await routing.tell(model(dead.replica(), good.replica()))
    await dead.down()
    assert {(await _ask(client)).headers["x-relight-instance"] for _ in range(4)} == {"i-good"}


async def test_a_request_whose_only_replica_died_is_held_for_the_next_one(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    dead = await make_engine("i-dead")
    await routing.tell(model(dead.replica()))
    await dead.down()
    request = asyncio.create_task(_ask(client))
    async with asyncio.timeout(DEADLINE):
        while "relight_gateway_retries_total{" not in (await client.get("/metrics")).text:
            pass
    await routing.tell(model(coming=1))
    await routing.until(lambda r: _held(r) == 1, since=len(routing.reports) - 1)
    good = await make_engine("i-good")
    await routing.tell(model(good.replica()))
    assert (await request).headers["x-relight-instance"] == "i-good"


async def test_a_stream_that_breaks_after_its_first_byte_is_cut_and_not_begun_again(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    broken, other = await make_engine("i-broken", cut_after=2), await make_engine("i-other", cut_after=2)
    await routing.tell(model(broken.replica(), other.replica()))
    pieces: list[bytes] = []

    async def read() -> None:
        async with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
            async for piece in answer.aiter_bytes():
                pieces.append(piece)  # noqa: PERF401 - what came before the cut counts

    with pytest.raises(httpx.RemoteProtocolError):
        await read()
    assert b"".join(pieces).count(b"data: ") == 2
    assert broken.stub.counts["started"] + other.stub.counts["started"] == 1


async def test_an_idle_connection_that_the_engine_closed_is_replaced(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    assert (await _ask(client)).status_code == 200
    for writer in engine.connections:
        writer.transport.abort()
    assert (await _ask(client)).status_code == 200


# ------------------------------------------------------------------------- draining and pinning


async def test_a_drained_replica_gets_nothing_new_and_its_last_request_is_told(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    old, new = await make_engine("i-old", token_delay=0.01), await make_engine("i-new")
    await routing.tell(model(old.replica()))
    request = asyncio.create_task(_ask(client, max_tokens=50))
    await routing.until(lambda r: _in_flight(r) == 1)
    table = await routing.tell(model(new.replica()))
    assert (await _ask(client)).headers["x-relight-instance"] == "i-new"
    report = await routing.until(
        lambda r: r.route_revision == table.revision and not any(i.instance == "i-old" for i in r.instances)
    )
    assert report.route_revision == table.revision
    assert (await request).status_code == 200


async def test_requests_go_where_the_fewest_are(client: httpx.AsyncClient, routing: Routing, make_engine: Any) -> None:
    one, two = await make_engine("i-1", token_delay=0.01), await make_engine("i-2", token_delay=0.01)
    await routing.tell(model(one.replica(), two.replica()))
    answers = await asyncio.gather(*(_ask(client, max_tokens=30) for _ in range(10)))
    assert sorted(a.headers["x-relight-instance"] for a in answers) == ["i-1"] * 5 + ["i-2"] * 5


@pytest.mark.parametrize(("token_", "status"), [("", 401), ("rlt_wrong", 401), (VIEWER, 403)])
async def test_only_operators_pin(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any, token_: str, status: int
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    headers = {"x-relight-pin": "i-a"} | ({"authorization": f"Bearer {token_}"} if token_ else {})
    assert (await _ask(client, headers)).status_code == status


async def test_a_pin_goes_to_that_replica_and_waits_for_it(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    one, two = await make_engine("i-1"), await make_engine("i-2")
    await routing.tell(model(one.replica()))
    pin = {"x-relight-pin": "i-2", "authorization": f"Bearer {OPERATOR}"}
    request = asyncio.create_task(_ask(client, pin))
    await routing.until(lambda r: _held(r) == 1)
    assert (await _ask(client)).headers["x-relight-instance"] == "i-1"
    await routing.tell(model(one.replica(), two.replica()))
    assert (await request).headers["x-relight-instance"] == "i-2"
    assert (await _ask(client, pin)).headers["x-relight-instance"] == "i-2"


async def test_the_pin_next_waits_for_the_next_incarnation_to_become_ready(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine("i-1")
    await routing.tell(model(engine.replica(1)))
    pin = {"x-relight-pin": "next", "authorization": f"Bearer {OPERATOR}"}
    request = asyncio.create_task(_ask(client, pin))
    await routing.until(lambda r: _held(r) == 1)
    await routing.tell(model(engine.replica(1)))
    await routing.tell(model(engine.replica(2)))
    assert (await request).headers["x-relight-incarnation"] == "2"


# ------------------------------------------------------------------------- what is told


async def test_the_first_request_of_an_incarnation_is_told_as_two_spans_without_a_gap(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    await routing.tell(model())
    request = asyncio.create_task(_ask(client, stream=True))
    await routing.until(lambda r: _held(r) == 1)
    engine = await make_engine()
    await routing.tell(model(engine.replica(3)))
    await request
    await _ask(client)
    report = await routing.until(lambda r: len(r.spans) >= 2)
    assert [(s.instance, s.incarnation, s.name) for s in report.spans] == [
        ("i-a", 3, "route"),
        ("i-a", 3, "first_token"),
    ]
    assert report.spans[0].start <= report.spans[0].end == report.spans[1].start <= report.spans[1].end


async def test_metrics_name_known_models_only(client: httpx.AsyncClient, routing: Routing, make_engine: Any) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    await _ask(client)
    await _ask(client, model="invented-by-a-client")
    text = (await client.get("/metrics")).text
    assert 'relight_gateway_requests_total{model="default/tiny",status="200"} 1.0' in text
    assert 'relight_gateway_requests_total{model="other",status="404"} 1.0' in text
    assert "invented" not in text


async def test_the_last_routes_stay_in_force_while_the_controller_is_away(
    door: Door, client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica()))
    for queue in list(routing._outgoing):
        queue.put_nowait(None)  # type: ignore[arg-type] - the stream ends with an error
    assert (await _ask(client)).status_code == 200


async def _reaches(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(2):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)
