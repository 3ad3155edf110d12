"""Starts as REST and the command line tell of them: why, compared with what, and for which tool."""

import asyncio
import json

from relight.core.records import Failure, Mode
from relight.core.states import State
from support.controlplane import DEADLINE, FakeAgent, FakeGateway, Running, model, relight, settled


async def get(running, path):
    reply = await running.client.get(f"/api/v1/{path}")
    assert reply.status_code == 200, reply.text
    return reply.json()


async def one_replica(fleet, **changes):
    running, agents, door = await fleet(agents=("a",), devices=2, models=[model(replicas=1, **changes)])
    await door.until(lambda t: t.models[0].replicas)
    await settled(running, ready=1)
    (instance,) = agents[0].instances
    async with asyncio.timeout(DEADLINE):
        while not running.controller.catalog.starts:
            await running.controller.catalog.reached(running.controller.catalog.revision + 1)
    return running, agents[0], instance


async def test_a_start_takes_the_mode_of_the_plan_to_the_agent_with_its_whole_ladder(fleet):
    running, agent, first = await one_replica(fleet)
    await running.ended(await running.scale(2))
    second = next(i for i in agent.assignment.instances if i.instance != first)
    assert second.mode is Mode.LAZY
    assert [r.kind for r in second.rungs] == ["peer_shm", "peer_tcp", "disk"]
    assert second.rungs[0].source.grant
    assert second.deadline_seconds == second.spec.start_deadline_seconds


async def test_after_a_failed_lazy_start_the_replacement_is_started_normally_and_says_why(fleet):
    running, (agent,), door = await fleet(agents=("a",), devices=2, models=[model(replicas=0)])
    agent.hold.add(State.READY)
    await running.scale(1)
    await agent.until(lambda a: a.instances)
    (first,) = agent.instances
    agent.hold.clear()
    agent.set(first, state=State.FAILED, failure=Failure("the zygote died", 0.1))
    await door.until(lambda t: t.models[0].replicas)
    (second,) = [i for i in agent.assignment.instances if i.instance != first]
    assert second.mode is Mode.NORMAL
    expected = running.controller.catalog.expected[second.instance].record
    lazy = next(p for p in expected.prices if p.mode is Mode.LAZY)
    assert lazy.reason == f"{first} failed by lazy: the zygote died"


async def test_a_replica_that_dies_after_it_served_says_nothing_against_its_mode(fleet):
    running, agent, first = await one_replica(fleet)
    agent.set(first, state=State.FAILED, failure=Failure("the engine was killed", 0.1), endpoint=None, source=None)
    await agent.until(lambda a: any(i.instance != first for i in a.assignment.instances))
    (second,) = [i for i in agent.assignment.instances if i.instance != first]
    assert second.mode is Mode.LAZY
    await settled(running, ready=1)


async def test_an_instance_is_explained_with_every_mode_it_could_have_taken(fleet):
    running, _, instance = await one_replica(fleet)
    told = await get(running, f"instances/{instance}/explanation")
    assert (told["mode"], told["planned_mode"], told["way"]) == ("lazy", "lazy", "lazy/disk")
    assert "the fastest that fits" in told["why"]
    assert told["process"] == "spawned: no zygote is ready"
    assert told["predicted_seconds"] > 0
    longest = told["phases"][0]
    assert longest["seconds"] == max(p["seconds"] for p in told["phases"])
    assert longest["knob"]
    modes = {m["mode"]: m for m in told["modes"]}
    assert list(modes) == ["guardian", "lazy", "normal", "cold"]
    assert modes["guardian"]["fits"] is False
    assert modes["lazy"]["measured_seconds"] == told["seconds"]
    assert modes["cold"]["predicted_seconds"] > modes["normal"]["predicted_seconds"]
    (same,) = (await get(running, "namespaces/default/models/m/explanations"))["items"]
    assert same == told
    assert (await running.client.get("/api/v1/instances/i-none/explanation")).status_code == 404
    assert (await running.client.get("/api/v1/namespaces/default/models/none/explanations")).status_code == 404


async def test_explain_takes_an_instance_or_a_model_and_prints_a_table_or_json(fleet):
    running, _, instance = await one_replica(fleet)
    for name in (instance, "m", "default/m"):
        status, out, err = await relight(running, "explain", name)
        assert status == 0, err
        assert f"{instance} of default/m: ready by lazy (lazy/disk)" in out
        assert "process: spawned: no zygote is ready" in out
        for mode in ("guardian", "lazy", "normal", "cold"):
            taken = "yes" if mode == "lazy" else "no"
            assert [mode, taken] in [line.split()[:2] for line in out.splitlines()]
    status, out, _ = await relight(running, "explain", "m", "--output", "json")
    assert status == 0
    assert [m["mode"] for m in json.loads(out)[0]["modes"]] == ["guardian", "lazy", "normal", "cold"]
    status, _, err = await relight(running, "explain", "nobody")
    assert status == 4
    assert "no start of nobody is recorded, and there is no model default/nobody" in err


async def test_a_timeline_is_compared_with_the_last_good_start_of_its_fingerprint(fleet):
    running, _, first = await one_replica(fleet, scale_to_zero={"keep": "nothing"})
    assert "no earlier good start" in (await get(running, f"instances/{first}/timeline"))["comparison"]["why"]
    await running.ended(await running.scale(0))
    await running.ended(await running.scale(1))
    (newest, before) = (await get(running, "starts"))["items"]
    assert newest["fingerprint"]["layout"] == {"dtype": "bf16"}
    assert newest["fingerprint_digest"] == before["fingerprint_digest"]
    timeline = await get(running, f"instances/{newest['instance']}/timeline")
    assert timeline["comparison"]["baseline"] == before["id"]
    assert "pull" in {p["name"] for p in timeline["comparison"]["phases"]}
    status, out, _ = await relight(running, "timeline")
    assert status == 0
    assert f"compared with {before['id']}" in out
    status, out, _ = await relight(running, "timeline", newest["instance"], "--output", "json")
    assert json.loads(out) == timeline


async def test_a_timeline_is_written_for_perfetto_and_for_collectors(fleet, tmp_path):
    running, _, instance = await one_replica(fleet)
    status, out, err = await relight(running, "timeline", instance, "--format", "otlp")
    assert status == 0, err
    (resource,) = json.loads(out)["resourceSpans"]
    assert json.loads(out) == await get(running, f"instances/{instance}/timeline/otlp")
    assert {s["name"] for s in resource["scopeSpans"][0]["spans"]} >= {"start by lazy", "accept", "pull"} - {"accept"}
    target = tmp_path / "start.json"
    status, out, err = await relight(running, "timeline", instance, "--format", "chrome", "--file", str(target))
    assert (status, out) == (0, ""), err
    assert {e["name"] for e in json.loads(target.read_text())["traceEvents"]} >= {"start", "pull"}
    status, _, err = await relight(running, "timeline", "--format", "chrome", "--file", str(tmp_path))
    assert status == 2
    assert "a file that can be written" in err


async def test_a_prediction_stands_written_before_its_start_and_outlives_the_controller(tmp_path):
    running = await Running.start(tmp_path, models=[model(replicas=1)])
    agent = FakeAgent("a", running.rpc)
    agent.hold.add(State.READY)
    agent.attach()
    await agent.until(lambda a: a.instances)
    (instance,) = agent.instances
    expected = running.controller.catalog.expected[instance].record
    assert [p.mode for p in expected.prices] == ["guardian", "lazy", "normal", "cold"]
    await running.stop()
    running = await Running.start(tmp_path)
    door = FakeGateway(running.rpc)
    try:
        agent.rpc = running.rpc
        door.attach()
        await door.until(lambda t: t.models and t.models[0].coming)
        agent.hold.clear()
        agent.obey()
        await door.until(lambda t: t.models[0].replicas)
        await settled(running, ready=1)
        async with asyncio.timeout(DEADLINE):
            while not running.controller.catalog.starts:
                await running.controller.catalog.reached(running.controller.catalog.revision + 1)
        told = await get(running, f"instances/{instance}/explanation")
        assert told["predicted_seconds"] == expected.seconds
        assert told["why"] == expected.reason
    finally:
        await door.detach()
        await agent.detach()
        await running.stop()


async def test_finished_starts_go_to_the_configured_collector_and_a_dead_one_holds_nothing_up(fleet):
    received = asyncio.Queue()

    async def collector(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        received.put_nowait((head.split(b"\r\n")[0], json.loads(await reader.readexactly(length))))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def counted(running, outcome):
        """Returns once the outcome shows in the metrics; every answer lets the sending task go on."""
        async with asyncio.timeout(DEADLINE):
            while f'relight_trace_exports_total{{outcome="{outcome}"}}' not in await metrics(running):
                pass
        return True

    async def metrics(running):
        return (await running.client.get("/metrics")).text

    server = await asyncio.start_server(collector, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    running, _, door = await fleet(
        agents=("a",), devices=2, models=[model(replicas=1)], otlp_endpoint=f"http://127.0.0.1:{port}"
    )
    try:
        await door.until(lambda t: t.models[0].replicas)
        async with asyncio.timeout(DEADLINE):
            line, document = await received.get()
        assert line == b"POST /v1/traces HTTP/1.1"
        assert document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] == "start by lazy"
    finally:
        server.close()
        await server.wait_closed()
    assert (await running.ended(await running.scale(2)))["state"] == "done"
    assert await counted(running, "failed")
