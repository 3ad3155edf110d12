"""Whom the cluster's identities let in: agents by the tokens of their pods, as their own slots alone."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.slots import pod_token

from relight.controller.kubernetes.api import POD, Api, Object
from relight.controller.kubernetes.pods import slot_of
from relight.controller.kubernetes.reviews import Reviews
from relight.controller.kubernetes.slot_identity import AUDIENCE, slot_name
from relight.core.clock import SystemClock
from relight.core.errors import Denied
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


async def _attach(cluster: Cluster, token: str, slot: str) -> grpc.StatusCode | None:
    """What becomes of an agent that says that it is `slot`: a status, or None when it is told what to do."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        call = fleet_pb2_grpc.FleetStub(channel).Attach(metadata=(("authorization", f"Bearer {token}"),))
        try:
            async with asyncio.timeout(20):
                await call.write(fleet_pb2.SlotReport(slot=slot, agent="stolen", sequence=1))
                await call.read()
                return None
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            call.cancel()


async def test_a_token_opens_the_slot_of_its_pod_and_no_other(cluster: Cluster) -> None:
    other = f"{cluster.namespace}-other"
    await asyncio.to_thread(cluster.plane.kubectl, "create", "namespace", other)
    controller = await cluster.controller()
    await cluster.apply(cluster.secret(), cluster.runtime(), cluster.pool(2))
    pods = await cluster.shows(idle=2)
    await cluster.until(lambda: controller.said("slot.attached"), "both to attach", lambda n: n == 2)
    first, second = pods
    own = await pod_token(cluster.api, first, AUDIENCE)
    assert await _attach(cluster, own, slot_of(first)) is None
    assert await _attach(cluster, own, slot_of(second)) is grpc.StatusCode.PERMISSION_DENIED
    assert await _attach(cluster, "t-agent", slot_of(first)) is grpc.StatusCode.UNAUTHENTICATED
    # One for the API server, such as every pod has, is none for the controller.
    for_the_server = await pod_token(cluster.api, first, "https://kubernetes.default.svc")
    assert await _attach(cluster, for_the_server, slot_of(first)) is grpc.StatusCode.UNAUTHENTICATED
    # A pod of another tenant, and one that no pool has made.
    stray = await cluster.api.create(POD, other, _pod(first["metadata"]["name"]))
    stolen = await pod_token(cluster.api, stray, AUDIENCE)
    assert await _attach(cluster, stolen, slot_of(first)) is grpc.StatusCode.PERMISSION_DENIED
    assert await _attach(cluster, stolen, slot_of(stray)) is grpc.StatusCode.UNAVAILABLE


async def test_the_server_says_of_which_pod_a_token_is_until_the_pod_is_gone(cluster: Cluster) -> None:
    account = await asyncio.to_thread(cluster.plane.service_account, "relight-controller", "relight-system")
    api = await Api.open(account.kubeconfig)
    try:
        pod = await cluster.api.create(POD, cluster.namespace, _pod("told"))
        # Two, because the server remembers for seconds what it said of one.
        token, unseen = [await pod_token(cluster.api, pod, AUDIENCE) for _ in range(2)]
        user = await Reviews(api, SystemClock()).user(token, AUDIENCE)
        assert slot_name(user) == f"told.{cluster.namespace}"
        await cluster.api.delete(POD, cluster.namespace, "told", grace=0)

        async def refused() -> bool:
            try:
                await Reviews(api, SystemClock()).user(unseen, AUDIENCE)
            except Denied:
                return True
            return False

        await cluster.until(refused, "the token to end with its pod")
    finally:
        await api.close()


def _pod(name: str) -> Object:
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "example/c:1"}], "nodeSelector": {"nowhere": "yes"}},
    }  # fmt: skip
