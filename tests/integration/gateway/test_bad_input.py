"""What is wrong with a request is said, and wakes nothing."""

from __future__ import annotations

from typing import Any

import httpx

from support.gateway import DEADLINE, Routing, ask, held, model

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
        answer = await ask(client, prompt="x" * 2000)
    assert answer.status_code == 400
    assert "at most 1024 bytes" in answer.json()["error"]["message"]


async def test_an_unknown_model_is_404_and_wakes_nothing(client: httpx.AsyncClient, routing: Routing) -> None:
    await routing.tell(model())
    seen = len(routing.reports)
    answer = await ask(client, model="nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    await routing.tell(model())
    assert all(held(r) == 0 and not r.models for r in routing.reports[seen:])
