"""What agents and gateways may not do on their streams."""

import asyncio

import grpc
import pytest

from relight.core.records import SlotReport
from relight.protos.convert import from_proto
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc, routing_pb2, routing_pb2_grpc
from support.controlplane import DEADLINE, TOKENS, FakeAgent, Running, model

GOOD = {"slot": "a", "agent": "x", "sequence": 1}


@pytest.fixture
async def running(tmp_path):
    found = await Running.start(tmp_path, models=[model(replicas=1)])
    yield found
    await found.stop()


async def attach(running, token, *messages, routing=False):
    """The status that a stream with these messages ends with."""
    async with grpc.aio.insecure_channel(running.rpc) as channel:
        stub = (routing_pb2_grpc.RoutingStub if routing else fleet_pb2_grpc.FleetStub)(channel)

        async def send():
            for message in messages:
                yield message
            # Open to the end: what is still being sent while the other end refuses fails in gRPC's own words.
            await asyncio.Event().wait()

        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            async with asyncio.timeout(DEADLINE):
                async for _ in stub.Attach(send(), metadata=metadata):
                    pass
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the stream ended well")


async def test_a_stream_needs_an_identity_of_its_role(running):
    assert (await attach(running, "")).code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await attach(running, "wrong")).code() is grpc.StatusCode.UNAUTHENTICATED
    for role in ("viewer", "operator", "gateway"):
        assert (await attach(running, TOKENS[role])).code() is grpc.StatusCode.PERMISSION_DENIED
    refused = await attach(running, TOKENS["agent"], routing=True)
    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
    assert running.controller.reconciler.fleet.seen == {}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"slot": "../a"}, "slot"),
        ({"agent": ""}, "agent"),
        ({"instances": [{"instance": "i-1", "state": "dancing", "members": 1}]}, "instances.0.state"),
        ({"instances": [{"instance": "i-1", "state": "ready", "members": 1, "rank": 4}]}, "instances.0.rank"),
        ({"devices": [{"id": "d"}, {"id": "d"}]}, "devices"),
        ({"cache": {"address": "elsewhere", "signer": "0" * 64, "grant_key": "0" * 64}}, "cache.address"),
        ({"cache": {"address": "tcp:h:1", "signer": "me", "grant_key": "0" * 64}}, "cache.signer"),
        ({"cache": {"address": "tcp:h:1", "signer": "0" * 64, "grant_key": "secret"}}, "cache.grant_key"),
    ],
)
async def test_a_wrong_report_is_refused_naming_the_field(running, wrong, field):
    error = await attach(running, TOKENS["agent"], fleet_pb2.SlotReport(**{**GOOD, **wrong}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.details()
    assert running.controller.reconciler.fleet.seen == {}


async def test_a_wrong_gateway_report_is_refused_naming_the_field(running):
    for wrong in ({"gateway": ""}, {"gateway": "g", "models": [{"name": "m", "held": -1}]}):
        error = await attach(running, TOKENS["gateway"], routing_pb2.GatewayReport(**wrong), routing=True)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert running.controller.reconciler.gateways.seen == {}


async def test_reports_repeated_and_out_of_order_do_no_harm(running):
    agent = FakeAgent("a", running.rpc)
    agent.attach()
    await agent.until(lambda a: a.instances)
    (name,) = agent.instances
    async with asyncio.timeout(DEADLINE):
        while not (shown := await running.instances()) or shown[0]["state"] != "ready":
            await running.controller.catalog.reached(running.controller.catalog.revision + 1)
    fleet = running.controller.reconciler.fleet
    seen = fleet.seen["a"]
    old = from_proto(fleet_pb2.SlotReport(slot="a", agent=seen.report.agent), SlotReport)
    assert fleet.report(old, seen.session) is False
    assert fleet.report(old, seen.session - 1) is False
    assert [i["id"] for i in await running.instances()] == [name]
    await agent.detach()
