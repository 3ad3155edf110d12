"""An agent that lies: what it claims of another tenant's model makes it neither a replica nor a source of it."""

from __future__ import annotations

import asyncio

import pytest

from relight.controller.observe.places import Place
from relight.core.auth import hash_token
from relight.core.records import CacheReport, InstanceReport
from relight.core.states import State
from support.controlplane import CLOCK, DEADLINE, FakeAgent, FakeGateway, Running, _offer, model

SIGNER = "5" * 64


@pytest.fixture
async def pair(tmp_path):
    """Model a/m on slot honest (and room for one more there), and slot liar, which is of tenant b."""
    models = [model(namespace=n, replicas=int(n == "a"), pool=f"{n}/pool") for n in ("a", "b")]
    running = await Running.start(tmp_path, models=models)
    running.controller.reconciler.places.set({"honest": Place("a/pool"), "liar": Place("b/pool")})
    honest, liar, door = (
        FakeAgent("honest", running.rpc, devices=2),
        FakeAgent("liar", running.rpc),
        FakeGateway(running.rpc),
    )
    for each in (honest, door):
        each.attach()
    yield running, honest, liar, door
    for each in (honest, liar, door):
        await each.detach()
    await running.stop()


def claim(name: str, **changes) -> InstanceReport:
    values = {
        "instance": name, "model": "a/m", "rank": 0, "members": 1, "devices": ("d0",), "state": State.READY,
        "since": CLOCK.now(), "cause": "says so", "incarnation": 1, "source": _offer("of-the-liar"),
    }  # fmt: skip
    return InstanceReport(**{**values, **changes})


async def test_who_claims_to_run_another_tenants_model_is_neither_routed_to_nor_counted(pair):
    running, honest, liar, door = pair
    table = await door.until(lambda t: any(m.replicas for m in t.models if m.namespace == "a"))
    (own,) = (i.instance for i in honest.assignment.instances)
    # One of a name of its own, and one that takes the name of the replica that serves.
    liar.instances = {"i-lie": claim("i-lie"), own: claim(own)}
    liar.attach()
    await _looked_at(running, "liar")
    shown = await running.instances()
    assert [(i["id"], i["members"][0]["slot"]) for i in shown if i["model"] == "a/m"] == [(own, "honest")]
    ended = await running.ended(await _scale(running, 2))
    assert ended["state"] == "done"
    (second,) = [i for i in honest.assignment.instances if i.instance != own]
    sources = [s for r in second.rungs for s in (r.source, *r.helpers) if s is not None]
    assert {(s.instance, s.slot) for s in sources} == {(own, "honest")}
    routed = {r.instance for m in door.table.models if m.namespace == "a" for r in m.replicas}
    assert "i-lie" not in routed
    assert own in {r.instance for m in table.models for r in m.replicas}


async def test_a_tenants_slot_hears_of_no_cache_node_of_another(pair):
    _, honest, liar, _ = pair
    honest.cache = CacheReport("tcp:127.0.0.1:7", "1" * 64, grant_key="1" * 64)
    liar.cache = CacheReport("tcp:127.0.0.1:8", SIGNER, grant_key="2" * 64)
    honest.dirty.set()
    liar.attach()
    await liar.until(lambda a: a.assignment.ring and [n.slot for n in a.assignment.ring.nodes] == ["liar"])
    heard = await honest.until(lambda a: a.assignment.ring and a.assignment.ring.nodes)
    assert [n.slot for n in heard.ring.nodes] == ["honest"]
    assert SIGNER not in heard.ring.signers


async def test_the_token_that_an_agent_is_shown_opens_no_other_agent(pair):
    running, honest, liar, _ = pair
    await liar.serve_logs()
    liar.attach()
    heard = await liar.until(lambda a: a.assignment.caller)
    own = (await honest.until(lambda a: a.instances)).instances[0].instance
    # It says that it is reached where the liar listens, as a liar would.
    honest.address = liar.address
    honest.dirty.set()
    async with asyncio.timeout(DEADLINE):
        while running.controller.reconciler.fleet.seen["honest"].report.agent_address != liar.address:
            await running.controller.catalog.reached(running.controller.catalog.revision + 1)
    assert (await running.client.get(f"/api/v1/instances/{own}/logs")).status_code == 200
    (shown,) = liar.asked.shown
    assert hash_token(shown) == honest.assignment.caller
    assert heard.caller != honest.assignment.caller


async def _looked_at(running, slot: str) -> None:
    """Until a pass has seen what `slot` reports: it writes down whom it saw at its end."""
    catalog = running.controller.catalog
    async with asyncio.timeout(DEADLINE):
        while slot not in catalog.slots:
            await catalog.reached(catalog.revision + 1)


async def _scale(running, replicas: int) -> dict:
    reply = await running.client.put("/api/v1/namespaces/a/models/m/scale", json={"replicas": replicas})
    assert reply.status_code == 202, reply.text
    return reply.json()
