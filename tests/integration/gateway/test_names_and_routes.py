"""A model answers to each of its names, and nothing but the known routes is there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from support.gateway import ASK, TEXT, Door, Engine, Routing, ask, model

SPELLINGS = (
    "/sleep", "/v1/sleep", "/v1/../sleep", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/load_lora",
    "/v1/completions/%2e%2e/%2e%2e/sleep", "/collective_rpc", "/docs", "/openapi.json", "/", "/v1/completions;x",
    "/%73leep", "/v1%2fcompletions%00",
)  # fmt: skip


@pytest.mark.parametrize("name", ["tiny", "default/tiny", "alias"])
async def test_a_model_answers_to_each_of_its_names_and_says_the_one_that_was_asked(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any, name: str
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica(7)))
    answer = await ask(client, model=name)
    assert answer.status_code == 200
    assert answer.json()["model"] == name
    assert answer.json()["choices"][0]["text"] == TEXT
    assert engine.bodies[-1]["model"] == "stub-i-a"
    assert answer.headers["x-relight-instance"] == "i-a"
    assert answer.headers["x-relight-incarnation"] == "7"


async def test_an_adapter_is_asked_for_by_the_name_that_engines_know_it_by(
    client: httpx.AsyncClient, routing: Routing, make_engine: Any
) -> None:
    engine = await make_engine()
    await routing.tell(model(engine.replica(7), adapters=("french",)))
    # The stub knows none, and says so itself: it was asked by the very name.
    answer = await ask(client, model="french")
    assert (answer.status_code, "not served here" in answer.text) == (404, True)
    assert engine.bodies[-1]["model"] == "french"
    assert "french" in {m["id"] for m in (await client.get("/v1/models")).json()["data"]}


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
    answer = await ask(client)
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
