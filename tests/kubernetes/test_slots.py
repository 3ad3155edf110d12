"""What a cluster does to slot pods while clients ask: drains, deletions, lost nodes, rollouts; nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.load import load

from relight.controller.kubernetes.api import NODE, POD
from relight.controller.kubernetes.marks import is_proven, state_of
from relight.controller.kubernetes.resources import DEVICE_POOL
from support.redisserver import RedisServer

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


async def _running(cluster: Cluster, slots: int = 4, **model: object) -> None:
    await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(slots), cluster.service())
    await cluster.apply(cluster.model(**{"replicas": 2, "guardians": {"replicas": slots - 2}, **model}))
    await cluster.shows(ready=2, guardian=slots - 2)


def _pod(slot: str) -> str:
    return slot.partition(".")[0]


async def test_a_replica_on_a_cordoned_node_serves_until_another_does_elsewhere(cluster: Cluster) -> None:
    await _running(cluster)
    pods = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in await cluster.pods()}
    node = pods[_pod(next(iter((await cluster.ready_instances()).values())))]
    async with load(cluster) as asked:
        await asked.some_more()
        await cluster.kubectl("cordon", node)
        try:
            await cluster.until(
                cluster.ready_instances,
                f"both replicas off {node}",
                lambda found: len(found) == 2 and all(pods[_pod(s)] != node for s in found.values()),
            )
            await asked.some_more()
        finally:
            await cluster.kubectl("uncordon", node)


async def test_a_deleted_pod_lets_go_only_when_its_replica_is_elsewhere_and_is_made_anew(cluster: Cluster) -> None:
    await _running(cluster)
    slot = next(iter((await cluster.ready_instances()).values()))
    async with load(cluster) as asked:
        await asked.some_more()
        await cluster.kubectl("delete", "pod", _pod(slot), "--wait=false")
        await cluster.until(
            cluster.ready_instances,
            "both replicas elsewhere",
            lambda found: len(found) == 2 and slot not in found.values(),
        )
        await asked.some_more()
        await cluster.until(
            cluster.pods,
            "four pods, none of them the deleted one",
            lambda pods: len(pods) == 4 and all(p["metadata"]["name"] != _pod(slot) for p in pods),
        )


async def test_replicas_of_a_lost_node_come_up_elsewhere(cluster: Cluster) -> None:
    node = await asyncio.to_thread(cluster.plane.hollow_node, "lost", {"lost": "yes"}, {"example.com/lost": 2})
    template = {"spec": {"nodeSelector": {"lost": "yes"}}}
    await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.service())
    await cluster.apply(
        cluster.pool(1, "doomed", podTemplate=template, slot={"devices": 1, "resourceName": "example.com/lost"}),
        cluster.pool(1),
    )
    await cluster.apply(cluster.model(replicas=1, poolRef={"name": "doomed"}))
    await cluster.shows(ready=1, idle=1)
    await asyncio.to_thread(node.kill)
    # Its processes go with it.
    (doomed,) = (s for s in cluster.kubelets.slots.values() if s.name.startswith("doomed"))
    await cluster.kubelets.crash(doomed)
    await cluster.until(
        lambda: cluster.api.get(NODE, "", "lost"),
        "the node to be not ready",
        lambda n: any(c["type"] == "Ready" and c["status"] != "True" for c in n["status"]["conditions"]),
    )
    await cluster.apply(cluster.model(replicas=1))
    await cluster.until(
        cluster.ready_instances, "a replica elsewhere", lambda found: [s for s in found.values() if "doomed" not in s]
    )
    await cluster.stands(readyReplicas=1)


async def test_a_pool_with_another_template_is_made_anew_pod_by_pod(cluster: Cluster) -> None:
    await _running(cluster)
    before = {p["metadata"]["name"] for p in await cluster.pods()}
    async with load(cluster) as asked:
        await asked.some_more()
        await cluster.apply(cluster.pool(4, podTemplate={"metadata": {"labels": {"release": "2"}}}))

        def made_anew(pods: list) -> bool:
            fresh = [p for p in pods if p["metadata"]["labels"].get("release") == "2"]
            return len(pods) == len(fresh) == 4

        await cluster.until(cluster.pods, "four pods of the new template", made_anew, 90)
        await cluster.stands(readyReplicas=2)
        await asked.some_more()
    assert before.isdisjoint(p["metadata"]["name"] for p in await cluster.pods())


async def test_a_pool_that_shrinks_gives_up_idle_slots_first_and_moves_what_serves(cluster: Cluster) -> None:
    await _running(cluster)
    ready = await cluster.ready_instances()
    await cluster.kubectl("scale", "devicepool/pool", "--replicas=2")
    await cluster.shows(ready=2)
    assert await cluster.ready_instances() == ready
    found = await cluster.get(DEVICE_POOL, "pool")
    assert found["status"]["slots"] == {"ready": 2, "idle": 0, "pending": 0}


async def test_an_agent_is_upgraded_in_place_under_a_running_engine(cluster: Cluster) -> None:
    await _running(cluster)
    ready = await cluster.ready_instances()
    items = (await cluster.rest("/api/v1/instances?limit=500"))["items"]
    pids = {i["id"]: i["members"][0]["pid"] for i in items if i["id"] in ready}
    async with load(cluster) as asked:
        await asked.some_more()
        for slot in list(cluster.kubelets.slots.values()):
            await cluster.kubelets.upgrade_agent(slot)
        await asked.some_more()
        await cluster.stands(readyReplicas=2)
    assert await cluster.ready_instances() == ready
    items = (await cluster.rest("/api/v1/instances?limit=500"))["items"]
    assert {i["id"]: i["members"][0]["pid"] for i in items if i["id"] in ready} == pids


async def test_a_new_revision_rolls_out_through_guardians_and_back(cluster: Cluster) -> None:
    await _running(cluster)
    pids = await _pids(cluster)
    async with load(cluster) as asked:
        for revision in ("r2", "r1"):
            await asked.some_more()
            await cluster.apply(
                cluster.model(
                    replicas=2, guardians={"replicas": 2}, model={"uri": f"/models/{revision}", "revision": revision}
                )
            )
            await cluster.stands(readyReplicas=2, currentRevision=revision, updateRevision=revision)
            await cluster.shows(ready=2, guardian=2)
    assert await _pids(cluster) == pids, "no process was started for it"


async def _pids(cluster: Cluster) -> set[int]:
    items = (await cluster.rest("/api/v1/instances?limit=500"))["items"]
    return {i["members"][0]["pid"] for i in items if i["model"].startswith(cluster.namespace)}


async def test_a_pod_of_another_making_is_left_alone(cluster: Cluster) -> None:
    await cluster.controller()
    stranger = {"containers": [{"name": "x", "image": "x"}]}
    await cluster.apply(cluster.object(POD, "stranger", stranger))
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(1))
    await cluster.until(cluster.pods, "the slot pod and the stranger", lambda pods: len(pods) == 2)
    await cluster.kubectl("scale", "devicepool/pool", "--replicas=0")
    left = await cluster.until(cluster.pods, "the stranger alone", lambda pods: len(pods) == 1)
    assert left[0]["metadata"]["name"] == "stranger"


async def test_an_emptied_redis_loses_no_intent_and_no_request(cluster: Cluster) -> None:
    server = RedisServer()
    try:
        controller = await cluster.controller(state_path=None, redis={"url": server.url})
        await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(4), cluster.service())
        await cluster.apply(cluster.model(replicas=2, guardians={"replicas": 2}))
        await cluster.shows(ready=2, guardian=2)
        ready = await cluster.ready_instances()
        async with load(cluster) as asked:
            await asked.some_more()
            with server.client() as client:
                await asyncio.to_thread(client.flushall)
            await asked.some_more()
            await cluster.kubectl("scale", "modeldeployment/m", "--replicas=3")
            await cluster.shows(ready=3, guardian=1)
            await asked.some_more()
        # Pods are as they were while their agents come back, some seconds apart.
        found = await cluster.until(cluster.ready_instances, "three that were heard of", lambda told: len(told) == 3)
        assert set(ready) < set(found), "what served serves on"
        assert controller.leading
    finally:
        server.close()


async def test_a_replica_of_two_members_spans_two_pods_and_is_reached_at_the_first(cluster: Cluster) -> None:
    await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(2), cluster.service())
    await cluster.apply(cluster.model(replicas=1, parallelism={"pipeline": 2}))
    await cluster.stands(readyReplicas=1, replicas=1)
    pods = await cluster.until(
        cluster.pods, "both pods to show it", lambda pods: [state_of(p) for p in pods] == ["ready", "ready"]
    )
    assert sorted(is_proven(p) for p in pods) == [False, True]
    assert await cluster.until(cluster.endpoints, "one address", lambda n: n == 1)
    assert {s.partition(".")[0] for s in (await cluster.ready_instances()).values()} <= {
        p["metadata"]["name"] for p in pods if is_proven(p)
    }
