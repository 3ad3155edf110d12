"""The built-in autoscaler over REST and real gRPC: the number follows demand, and the log says why."""

from __future__ import annotations

import asyncio

from support.controlplane import DEADLINE, model, relight

ON = {"enabled": True, "window_seconds": 0.3}


async def scaled(fleet, replicas=1, **changes):
    models = [
        model(
            replicas=replicas, max_replicas=3, guardians={"replicas": 2}, scaling={"requests_per_replica": 4},
            **{"autoscaler": ON, **changes},
        )
    ]  # fmt: skip
    running, _, door = await fleet(agents=("a", "b", "c"), models=models)
    return running, door


async def stands(running, **counts):
    """The model as the API shows it, once it stands as told; `replicas` is the written number."""
    async with asyncio.timeout(DEADLINE):
        while True:
            revision = running.controller.catalog.revision
            shown = (await running.client.get("/api/v1/namespaces/default/models/m")).json()
            seen = {**shown, "replicas": shown["spec"]["replicas"]}
            if all(seen[k] == v for k, v in counts.items()):
                return shown
            await running.controller.catalog.reached(revision + 1)


async def log(running):
    reply = await running.client.get("/api/v1/namespaces/default/models/m/autoscaler")
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_the_number_follows_demand_up_and_after_the_window_down(fleet):
    running, door = await scaled(fleet)
    await stands(running, ready=1, dormant=2)
    door.demand(held=1, in_flight=10)
    await stands(running, replicas=3, ready=3)
    door.demand(in_flight=2)
    await stands(running, replicas=1, ready=1, dormant=2)
    said = await log(running)
    assert said["enabled"]
    newest = said["decisions"][0]
    moves = [(d["action"], d["written"], d["number"]) for d in reversed(said["decisions"]) if d["action"] != "steady"]
    assert ("up", 1, 3) in moves
    assert moves[-1] == ("down", 3, 1) or newest["action"] == "steady"
    up = next(d for d in said["decisions"] if d["action"] == "up")
    assert (up["held"], up["in_flight"], up["target"]) == (1, 10, 3)
    assert "11 requests, 4 a replica, ask for 3" in up["reason"]
    status, out, err = await relight(running, "autoscaler", "m")
    assert (status, "ask for 3" in out) == (0, True), err
    operations = (await running.client.get("/api/v1/operations")).json()["items"]
    assert {o["by"] for o in operations if o["kind"] == "scale"} == {"relight-autoscaler"}


async def test_idle_for_long_enough_it_goes_to_zero_and_the_first_request_brings_it_back(fleet):
    running, door = await scaled(fleet, scale_to_zero={"idle_seconds": 0.3})
    door.demand()
    await stands(running, replicas=0, ready=0)
    door.demand(held=1)
    await stands(running, replicas=1, ready=1)


async def test_without_a_gateway_the_number_is_held(fleet):
    running, door = await scaled(fleet)
    door.demand(in_flight=12)
    await stands(running, replicas=3, ready=3)
    await door.detach()
    async with asyncio.timeout(DEADLINE):
        while (newest := (await log(running))["decisions"][0])["target"] is not None:
            continue
    assert (newest["action"], newest["number"]) == ("hold", 3)
    assert "missing" in newest["reason"]


async def test_it_leaves_alone_what_it_is_not_asked_to_scale(fleet):
    running, door = await scaled(fleet, autoscaler={})
    door.demand(held=40)
    await stands(running, ready=1)
    assert await log(running) == {"enabled": False, "decisions": []}
    reply = await running.client.get("/api/v1/namespaces/default/models/other/autoscaler")
    assert reply.status_code == 404
