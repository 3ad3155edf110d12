"""The doctor over REST, at admission and on the command line."""

import dataclasses
import json

import pytest

from relight.core.records import Capability, PcieLink, Verdict
from support.controlplane import FakeAgent, Running, model, relight

BAD = {"engine": "vllm", "args": ["--enforce-eager", "--api-key", "sk-1", "--block-size", "256"]}
PATH = "/api/v1/namespaces/default/models/m"


@pytest.fixture
async def running(tmp_path):
    found = await Running.start(tmp_path, models=[model(**BAD), model("good")])
    agent = FakeAgent("a", found.rpc)
    agent.devices = tuple(dataclasses.replace(d, pcie=PcieLink(4, 8, 4, 16)) for d in agent.devices)
    agent.attach()
    yield found
    await agent.detach()
    await found.stop()


async def _findings(running, **query):
    reply = await running.client.get("/api/v1/doctor", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()["items"]


async def test_models_and_slots_are_judged_the_worst_first(running):
    async def slots():
        return (await running.client.get("/api/v1/slots")).json()["items"]

    while not await slots():
        await running.controller.catalog.reached(running.controller.catalog.revision + 1)
    found = await _findings(running)
    assert [(f["severity"], f["about"], f["rule"]) for f in found] == [
        ("danger", "default/m", "secret_on_command_line"),
        ("warning", "a", "pcie_below_its_best"),
        ("warning", "default/m", "eager_mode"),
        ("advice", "default/m", "big_blocks"),
    ]
    assert found[1]["evidence"] == "d0: 8 of 16 lanes"
    assert all(f["cost"] and f["fix"] for f in found)
    page = (await running.client.get("/api/v1/doctor", params={"limit": 1})).json()
    rest = (await running.client.get("/api/v1/doctor", params={"continue": page["continue"]})).json()
    assert [*page["items"], *rest["items"]] == found


async def test_one_model_is_asked_for_and_one_that_is_not_there_is_not_found(running):
    assert {f["about"] for f in await _findings(running, model="default/m")} == {"default/m"}
    assert await _findings(running, model="default/good") == []
    assert (await running.client.get("/api/v1/doctor", params={"model": "default/none"})).status_code == 404


async def test_who_writes_a_model_hears_dangers_and_warnings_at_once(running):
    body = {k: v for k, v in model().items() if k not in ("name", "namespace")}
    told = (await running.client.put(PATH, json={**body, **BAD})).json()["warnings"]
    assert [line.partition(":")[0] for line in told] == ["danger", "warning"]
    assert "--enforce-eager" in told[1]
    assert (await running.client.put(PATH, json=body)).json()["warnings"] == []


async def test_the_command_prints_lines_for_people_and_json_for_scripts(running):
    status, out, err = await relight(running, "doctor", "--model", "default/m")
    assert status == 0, err
    assert "DANGER default/m: a secret stands on the command line" in out
    assert "do: By a variable out of a Secret" in out
    status, out, _ = await relight(running, "doctor", "--model", "default/m", "--output", "json")
    assert status == 0
    assert [f["rule"] for f in json.loads(out)] == ["secret_on_command_line", "eager_mode", "big_blocks"]
    status, out, _ = await relight(running, "doctor", "--model", "default/good")
    assert (status, out.strip()) == (0, "nothing to say")


async def test_capabilities_are_told_with_what_they_rest_on(tmp_path):
    running = await Running.start(tmp_path, models=[model()])
    agent = FakeAgent("a", running.rpc)
    agent.capabilities = (
        Capability("stub", "guardian", Verdict.NO, "9 GiB left behind", 8, 1000.0),
        Capability("stub", "lazy", Verdict.UNKNOWN, "nothing was seen of it yet"),
    )
    agent.attach()
    try:
        while not (await running.client.get("/api/v1/slots")).json()["items"]:
            await running.controller.catalog.reached(running.controller.catalog.revision + 1)
        status, out, err = await relight(running, "capabilities")
        assert status == 0, err
        lines = [line.split() for line in out.splitlines()]
        assert ["a", "stub", "guardian", "8", "no", "1970-01-01", "00:16:40", "9", "GiB", "left", "behind"] in lines
        assert [line[:6] for line in lines if "lazy" in line] == [["a", "stub", "lazy", "any", "unknown", "-"]]
        status, out, _ = await relight(running, "capabilities", "--slot", "b", "--output", "json")
        assert (status, json.loads(out)) == (0, [])
        page = (await running.client.get("/api/v1/capabilities", params={"limit": 1})).json()
        assert [c["name"] for c in page["items"]] == ["guardian"]
        assert page["continue"]
    finally:
        await agent.detach()
        await running.stop()


async def test_a_model_without_a_record_gets_no_suggestion_and_one_that_is_not_there_is_not_found(running):
    status, out, err = await relight(running, "suggest", "m")
    assert (status, out.strip()) == (0, "the record of m speaks for no change"), err
    status, _, err = await relight(running, "suggest", "none")
    assert status == 4
    assert "there is no model default/none" in err
