"""Several controllers, and an API server that goes away: no step of an old epoch takes effect, nothing is lost."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import Any

import grpc.aio
import httpx
import pytest
from tests.kubernetes.cluster import TOKENS, Cluster, ControllerProcess
from tests.kubernetes.figures import COUNTS, FIGURES

from relight.controller.kubernetes.api import POD, Api, Gone, Object
from relight.controller.kubernetes.cache import Cache
from relight.controller.kubernetes.marks import is_proven
from relight.controller.kubernetes.resources import ENGINE_RUNTIME, MODEL_DEPLOYMENT
from relight.core.errors import Conflict
from relight.core.records import Assignment
from relight.protos.convert import to_proto
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc

IDLE_SECONDS = 10.0

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


async def _two(cluster: Cluster) -> tuple[ControllerProcess, ControllerProcess]:
    first = await cluster.controller("one")
    await first.leads()
    second = await cluster.controller("two")
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(2), cluster.service())
    await cluster.apply(cluster.model(replicas=1, guardians={"replicas": 1}))
    await cluster.stands(readyReplicas=1)
    await cluster.until(lambda: cluster.status(), "a guardian", lambda s: s["guardians"]["ready"] == 1)
    assert second.said("controller.ready") == 0
    return first, second


def _shown(pods: list[Object]) -> dict[str, tuple[dict[str, str], bool]]:
    """Labels and gate of each pod: what a controller writes."""
    return {p["metadata"]["name"]: (p["metadata"]["labels"], is_proven(p)) for p in pods}


def _adopted(controller: ControllerProcess) -> set[str]:
    return {e["slot"] for e in controller.events() if e["event"] == "slot.adopted"}


async def _unplaced(cluster: Cluster, controller: ControllerProcess) -> list[str]:
    """Why replicas are missing, as it answers who asks what would happen were the number written anew."""
    url = f"http://127.0.0.1:{controller.http_port}/api/v1/namespaces/{cluster.namespace}/models/m/scale"
    async with httpx.AsyncClient(timeout=10, headers={"Authorization": f"Bearer {TOKENS['operator']}"}) as client:
        reply = await client.put(url, params={"dry_run": "server"}, json={"replicas": 1})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["unplaced"])


async def test_a_killed_leader_is_followed_by_another_that_takes_nothing_down(cluster: Cluster) -> None:
    first, second = await _two(cluster)
    before = set(await cluster.ready_instances())
    await first.crash()
    await second.leads()
    await cluster.kubectl("scale", "modeldeployment/m", "--replicas=2")
    await cluster.stands(readyReplicas=2)
    assert before <= set(await cluster.ready_instances())


async def test_a_new_leader_wakes_nobody_in_the_stead_of_a_replica_that_it_has_not_heard_of(cluster: Cluster) -> None:
    first, second = await _two(cluster)
    before = await cluster.ready_instances()
    (where,) = before.values()
    serving = next(s for s in cluster.kubelets.slots.values() if where == f"{s.name}.{cluster.namespace}")
    (asleep,) = {f"{s.name}.{cluster.namespace}" for s in cluster.kubelets.slots.values()} - {where}
    assert serving.agent is not None
    serving.agent.send_signal(signal.SIGSTOP)
    try:
        await first.crash()
        await second.leads()
        # Its own store knows nothing, and of the two slots it hears of the one with the guardian alone.
        await cluster.until(lambda: _adopted(second), "the guardian to be known again", lambda slots: slots == {asleep})
        told = await _unplaced(cluster, second)
        assert told == [f"{cluster.namespace}/m: {where} was not heard of yet, and is said to have a replica"]
        assert [is_proven(p) for p in await cluster.pods()].count(True) == 1
    finally:
        serving.agent.send_signal(signal.SIGCONT)
    await cluster.until(lambda: _adopted(second), "both to be known again", lambda slots: slots == {asleep, where})
    await cluster.stands(readyReplicas=1)
    assert await cluster.ready_instances() == before
    assert not [e for e in second.events() if e["event"] == "placed" and e["desired"] == "ready"]


async def test_a_leader_that_was_frozen_past_its_lease_changes_nothing_when_it_wakes(cluster: Cluster) -> None:
    first, second = await _two(cluster)
    first.freeze()
    try:
        # Written while nobody can see it: the first thing that the old leader will want to act on.
        await cluster.kubectl("scale", "modeldeployment/m", "--replicas=2")
        await second.leads()
        await cluster.stands(readyReplicas=2)
        await cluster.kubectl("scale", "modeldeployment/m", "--replicas=1")
        await cluster.shows(ready=1, guardian=1)
        pods = _shown(await cluster.pods())
        model = (await cluster.get(MODEL_DEPLOYMENT, "m"))["spec"]
    finally:
        first.thaw()
    await cluster.until(lambda: first.said("controller.failed"), "the old leader to end, and stand again")
    told = [e for e in first.events() if e["event"] == "controller.failed"]
    assert [e["code"] for e in told] == ["fenced"]
    COUNTS.update(stale_epoch_attempts=1, stale_epoch_effects=pods != _shown(await cluster.pods()))
    assert pods == _shown(await cluster.pods())
    assert (await cluster.get(MODEL_DEPLOYMENT, "m"))["spec"] == model


class _Stale(fleet_pb2_grpc.FleetServicer):
    """A leader of an earlier epoch that still has the agents' streams: it wants everything gone."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.told = epoch, set[str]()

    async def Attach(self, requests, context):  # noqa: N802 - the name is the protocol's
        async for message in requests:
            self.told.add(message.slot)
            yield to_proto(Assignment(message.slot, self.epoch, 1 << 40), fleet_pb2.Assignment)


async def test_no_step_of_an_earlier_epoch_takes_effect_at_agents_or_pods(cluster: Cluster) -> None:
    first, second = await _two(cluster)
    before = await cluster.ready_instances()
    old = next(p for p in await cluster.pods() if not is_proven(p))
    await first.crash()
    await second.leads()
    await cluster.kubectl("scale", "modeldeployment/m", "--replicas=2")
    await cluster.stands(readyReplicas=2)
    ready = await cluster.ready_instances()
    assert set(before) < set(ready)
    epochs = [e["epoch"] for c in (first, second) for e in c.events() if e["event"] == "controller.ready"]
    assert epochs[1] - epochs[0] >= 1 << 9, "every epoch of a leader is above all that an earlier store gave"

    stale = _Stale(epochs[0])
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetServicer_to_server(stale, server)
    cluster.service_for_agents.override = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    cluster.service_for_agents.cut()
    slots = cluster.kubelets.slots.values()
    await cluster.until(lambda: len(stale.told) == 2, "both agents to hear the old leader")
    await cluster.until(
        lambda: all("assignment.fenced" in (s.directory / "agent.log").read_text() for s in slots), "a refusal of each"
    )
    COUNTS.update(stale_epoch_attempts=len(stale.told))
    cluster.service_for_agents.override = 0
    await server.stop(0)
    await cluster.stands(readyReplicas=2)
    after = await cluster.until(cluster.ready_instances, "what agents run", lambda found: len(found) == 2)
    COUNTS.update(stale_epoch_effects=after != ready)
    assert after == ready

    gate = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"], "labels": {"relight.dev/model": "x"}}}
    with pytest.raises(Conflict):
        await cluster.api.patch(POD, cluster.namespace, old["metadata"]["name"], gate)
    COUNTS.update(stale_epoch_attempts=1)


async def test_a_cluster_at_rest_asks_little_of_the_api_server(cluster: Cluster) -> None:
    controller = await cluster.controller(lease_seconds=15.0)
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(2), cluster.service())
    await cluster.apply(cluster.model(replicas=1, guardians={"replicas": 1}))
    await cluster.shows(ready=1, guardian=1)
    await cluster.until(cluster.endpoints, "the Service to have it", lambda n: n == 1)
    await cluster.until(
        cluster.status, "all of it told", lambda s: (s.get("readyReplicas"), s["guardians"]["ready"]) == (1, 1)
    )
    before = cluster.api_calls()
    # An interval to count in: nothing is waited for.
    await asyncio.sleep(IDLE_SECONDS)
    told = Counter(cluster.api_calls()) - Counter(before)
    FIGURES["api_calls_per_minute_idle"] = round(sum(told.values()) * 60 / IDLE_SECONDS, 1)
    assert set(told) <= {("update", "leases")}, told
    assert controller.leading


async def test_what_was_written_while_the_api_server_was_away_is_done_when_it_is_back(cluster: Cluster) -> None:
    controller = await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(2), cluster.service())
    await cluster.apply(cluster.model(replicas=1, guardians={"replicas": 1}))
    await cluster.stands(readyReplicas=1)
    before = set(await cluster.ready_instances())
    await asyncio.to_thread(cluster.plane.kill_apiserver)
    await cluster.until(lambda: controller.said("watch.broken") > 0, "the controller to notice")
    # Not in a thread of this test's: servers die with the thread that started them, and other tests need this one.
    cluster.plane.start_apiserver()
    await cluster.leader()
    await cluster.kubectl("scale", "modeldeployment/m", "--replicas=2")
    await cluster.stands(readyReplicas=2)
    assert before <= set(await cluster.ready_instances())


class _LateList:
    """The cluster's API, whose first list is of a version that the server has long forgotten."""

    def __init__(self, api: Api) -> None:
        self._api, self.lists, self.watch = api, 0, api.watch

    async def list(self, *words: Any, **options: Any) -> tuple[list[Object], str]:
        self.lists += 1
        items, version = await self._api.list(*words, **options)
        return (items, version) if self.lists > 1 else ([], "1")


async def test_a_watch_that_the_server_no_longer_knows_of_begins_with_a_list(cluster: Cluster) -> None:
    await cluster.apply(cluster.runtime())
    with pytest.raises(Gone):
        await anext(aiter(cluster.api.watch(ENGINE_RUNTIME, "1")))
    late = _LateList(cluster.api)
    cache = Cache(late, ENGINE_RUNTIME, lambda: None)  # type: ignore[arg-type]
    following = asyncio.create_task(cache.run())
    try:
        key = f"{cluster.namespace}/stub"
        await cluster.until(lambda: key in cache.objects, "what was there to be known")
        assert late.lists == 2
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
