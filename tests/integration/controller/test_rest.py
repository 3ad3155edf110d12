"""The REST API as its callers see it: errors, preconditions, repeats, dry runs, pages, events."""

import asyncio
import json

import httpx
import pytest

from support.controlplane import CLOCK, TOKENS, Running, model

MODEL = "/api/v1/namespaces/default/models/m"
SPEC = {k: v for k, v in model().items() if k not in ("name", "namespace")}


@pytest.fixture
async def running(tmp_path):
    found = await Running.start(tmp_path, models=[model()])
    yield found
    await found.stop()


def as_role(running, role):
    return httpx.AsyncClient(base_url=running.base, headers={"Authorization": f"Bearer {TOKENS[role]}"})


def problem(reply, status):
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["x-request-id"]
    body = reply.json()
    assert body["status"] == status
    assert body["instance"] == reply.request.url.path
    return body


async def test_every_error_is_a_problem(running):
    client = running.client
    problem(await client.get("/nowhere"), 404)
    assert problem(await client.post(MODEL), 405)["detail"]
    assert (await client.post(MODEL)).headers["allow"]
    problem(await client.get("/api/v1/namespaces/default/models/none"), 404)
    body = problem(await client.put(f"{MODEL}/scale", json={"replicas": -1, "colour": 1}), 422)
    assert {e["field"] for e in body["errors"]} == {"body.replicas", "body.colour"}
    for wrong in ("1", True, 1.5, None, float(1 << 40)):
        problem(await client.put(f"{MODEL}/scale", json={"replicas": wrong}), 422)
    problem(await client.put(f"{MODEL}/scale", content=b"{"), 422)
    problem(await client.put(f"{MODEL}/scale", json={"replicas": 65}), 409)


async def test_who_has_no_identity_or_the_wrong_role_changes_nothing(running):
    async with httpx.AsyncClient(base_url=running.base) as nobody:
        reply = await nobody.get("/api/v1/instances")
        problem(reply, 401)
        assert reply.headers["www-authenticate"].startswith("Bearer")
        for path in ("/livez", "/healthz", "/readyz", "/metrics", "/openapi.json"):
            assert (await nobody.get(path)).status_code == 200
    async with as_role(running, "viewer") as viewer:
        assert (await viewer.get(MODEL)).status_code == 200
        problem(await viewer.put(f"{MODEL}/scale", json={"replicas": 1}), 403)
        problem(await viewer.delete(MODEL), 403)
    async with as_role(running, "agent") as agent:
        problem(await agent.get(MODEL), 403)
    assert (await running.client.get(MODEL)).json()["spec"]["replicas"] == 0


async def test_no_route_but_the_open_ones_answers_without_a_token(running):
    document = (await running.client.get("/openapi.json")).json()
    async with httpx.AsyncClient(base_url=running.base) as nobody:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if operation.get("security"):
                    found = path.replace("{namespace}", "n").replace("{name}", "m").replace("{id}", "i")
                    problem(await nobody.request(method, found), 401)


async def test_a_write_on_a_stale_etag_is_refused(running):
    first = await running.client.get(MODEL)
    tag = first.headers["etag"]
    changed = await running.client.put(MODEL, json={**SPEC, "replicas": 0}, headers={"If-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    problem(await running.client.put(MODEL, json=SPEC, headers={"If-Match": tag}), 412)
    problem(await running.client.delete(MODEL, headers={"If-Match": tag}), 412)
    new = "/api/v1/namespaces/default/models/new"
    problem(await running.client.put(new, json=SPEC, headers={"If-Match": "*"}), 412)
    assert (await running.client.put(new, json=SPEC)).status_code == 201
    assert (await running.client.delete(new)).status_code == 204
    problem(await running.client.get(new), 404)


async def test_a_repeat_with_the_same_key_answers_the_same_operation(running):
    key = {"Idempotency-Key": "k1"}
    replies = await asyncio.gather(
        *(running.client.put(f"{MODEL}/scale", json={"replicas": 1}, headers=key) for _ in range(5))
    )
    assert {r.status_code for r in replies} == {202}
    assert len({r.json()["id"] for r in replies}) == 1
    problem(await running.client.put(f"{MODEL}/scale", json={"replicas": 2}, headers=key), 422)
    other = await running.client.put(f"{MODEL}/scale", json={"replicas": 1}, headers={"Idempotency-Key": "k2"})
    assert other.json()["id"] != replies[0].json()["id"]


async def test_a_dry_run_answers_the_plan_with_prices_and_changes_nothing(running):
    before = running.controller.catalog.revision
    reply = await running.client.put(f"{MODEL}/scale", params={"dry_run": "server"}, json={"replicas": 2})
    assert reply.status_code == 200
    assert reply.json()["decisions"][0]["replicas"] == 2
    assert "no slot" in reply.json()["unplaced"][0]
    assert running.controller.catalog.revision == before


async def test_pages_cover_everything_once(running):
    for n in range(5):
        await running.client.put(f"/api/v1/namespaces/default/models/p{n}", json=SPEC)
    found, cursor = [], ""
    while True:
        page = (
            await running.client.get("/api/v1/namespaces/default/models", params={"limit": 2, "continue": cursor})
        ).json()
        found += [m["spec"]["name"] for m in page["items"]]
        cursor = page["continue"]
        if not cursor:
            break
    assert found == ["m", "p0", "p1", "p2", "p3", "p4"]
    reply = await running.client.get("/api/v1/operations", params={"continue": "%%"})
    assert problem(reply, 422)["errors"][0]["field"] == "query.continue"


async def events(running, last, count):
    found = []
    async with running.client.stream(
        "GET", "/api/v1/events", headers={"Last-Event-ID": str(last)}, params={"limit_events": count}
    ) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            elif line.startswith("id: "):
                found.append(int(line[4:]))
    return found[0::2], found[1::2]


async def test_events_resume_after_the_last_one_seen_and_hold_no_secret(running):
    start = running.controller.catalog.revision
    await running.scale(1)
    ids, data = await events(running, start, 2)
    assert ids == sorted(ids)
    assert {d["kind"] for d in data} == {"operations", "models"}
    again, rest = await events(running, ids[0], 1)
    assert (again[0], rest[0]) == (ids[1], data[1])
    await running.controller.catalog.store.compact(ids[0])
    problem(await running.client.get("/api/v1/events", headers={"Last-Event-ID": str(start)}), 410)
    problem(await running.client.get("/api/v1/events", headers={"Last-Event-ID": "999999"}), 410)
    problem(await running.client.get("/api/v1/events", headers={"Last-Event-ID": "x"}), 422)
    empty = await running.client.get("/api/v1/events", params={"limit_seconds": 0})
    assert empty.status_code == 200


async def test_a_strange_request_id_is_replaced_and_a_plain_one_comes_back(running):
    reply = await running.client.get("/livez", headers={"X-Request-ID": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    reply = await running.client.get("/livez", headers={"X-Request-ID": "a b\tc"})
    assert reply.headers["x-request-id"].startswith("r-")


@pytest.mark.parametrize(
    ("header", "believed"),
    [
        ("t={:.6f}", True),
        ("", False),
        ("t=soon", False),
        ("t=9999999999.5", False),
        ("t=1.0", False),
        ("{:.6f}", False),
    ],
)
async def test_acceptance_begins_when_the_request_was_sent_if_the_senders_clock_can_be_believed(
    running, header: str, believed: bool
) -> None:
    sent = CLOCK.now() - 0.5
    headers = {"x-request-start": header.format(sent)}
    reply = await running.client.put(f"{MODEL}/scale", json={"replicas": 1}, headers=headers)
    (phase,) = [p for p in reply.json()["phases"] if p["name"] == "accept"]
    assert (phase["start"] == pytest.approx(sent, abs=1e-5)) is believed
    assert phase["start"] <= phase["end"]
