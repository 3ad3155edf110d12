"""KEDA's calls, made by the stubs of its own protocol, to a controller with scripted agents and a scripted gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from relight.protos.externalscaler import externalscaler_pb2 as messages
from relight.protos.externalscaler import externalscaler_pb2_grpc as services
from support.controlplane import DEADLINE, free_port, model, settled


def ref(namespace="default", **metadata):
    return messages.ScaledObjectRef(name="so", namespace=namespace, scalerMetadata={"model": "m", **metadata})


def metrics(name, **metadata):
    return messages.GetMetricsRequest(scaledObjectRef=ref(**metadata), metricName=name)


@pytest.fixture
async def scaled(fleet):
    """A model at zero with a guardian, and KEDA's side of the connection."""

    @asynccontextmanager
    async def start(gateway=True, **changes) -> AsyncIterator:
        port = free_port()
        models = [model(replicas=0, guardians={"replicas": 1}, **changes)]
        running, _, door = await fleet(models=models, gateway=gateway, external_scaler={"port": port})
        await settled(running, dormant=1)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield running, door, services.ExternalScalerStub(channel)

    return start


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def following(call):
    """The answers of a stream, as they come."""
    queue = asyncio.Queue()

    async def read():
        async for said in call:
            queue.put_nowait(said)

    task = asyncio.create_task(read())
    try:
        while True:
            async with asyncio.timeout(DEADLINE):
                said = await queue.get()
            yield said
    finally:
        call.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_first_held_request_is_pushed_and_a_replica_is_ready_when_the_number_is_written(scaled):
    async with scaled() as (running, door, keda):
        active = following(keda.StreamIsActive(ref()))
        door.demand()
        assert not (await anext(active)).result
        door.demand(held=1)
        assert (await anext(active)).result
        assert (await running.ended(await running.scale(1)))["state"] == "done"
        assert (await keda.IsActive(ref())).result
        door.demand()
        assert not (await anext(active)).result
        await active.aclose()


async def test_metrics_and_their_specs_are_told_whole_and_as_fractions(scaled):
    async with scaled(scaling={"requests_per_replica": 4}, max_replicas=9) as (_, door, keda):
        active = following(keda.StreamIsActive(ref()))
        door.demand(held=3, in_flight=7)
        assert (await anext(active)).result
        (spec,) = (await keda.GetMetricSpec(ref())).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("demand", 4, 4.0)
        (spec,) = (await keda.GetMetricSpec(ref(metric="target_replicas", target="1.5"))).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("target_replicas", 2, 1.5)
        for name, value in {"demand": 10, "held_requests": 3, "in_flight_requests": 7, "target_replicas": 3}.items():
            (told,) = (await keda.GetMetrics(metrics(name, metric=name))).metricValues
            assert (told.metricName, told.metricValue, told.metricValueFloat) == (name, value, float(value))
        await active.aclose()


async def test_specs_are_streamed_at_once_and_again_when_the_model_is_written_anew(scaled):
    async with scaled() as (running, _, keda):
        specs = following(keda.StreamMetricSpec(ref()))
        assert (await anext(specs)).metricSpecs[0].targetSizeFloat == 8.0
        body = {"uri": "/models/m", "revision": "r1", "engine": "stub", "scaling": {"requests_per_replica": 3}}
        reply = await running.client.put("/api/v1/namespaces/default/models/m", json=body)
        assert reply.status_code == 200, reply.text
        assert (await anext(specs)).metricSpecs[0].targetSizeFloat == 3.0
        assert (await keda.GetMetricSpec(ref())).metricSpecs[0].targetSizeFloat == 3.0
        await specs.aclose()


async def test_missing_demand_is_an_error_and_never_nothing(scaled):
    async with scaled(gateway=False) as (_, _, keda):
        for call in (keda.IsActive(ref()), keda.GetMetrics(metrics("demand"))):
            code, told = await refused(call)
            assert (code, "no gateway" in told) == (grpc.StatusCode.UNAVAILABLE, True)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"model": ""}, "model"),
        ({"model": "No Name"}, "model"),
        ({"namespace": "a/b"}, "namespace"),
        ({"metric": "ready_replicas"}, "metric"),
        ({"target": "0"}, "target"),
        ({"target": "nan"}, "target"),
        ({"target": "many"}, "target"),
        ({"targetSize": "3"}, "targetSize"),
    ],
)
async def test_wrong_metadata_are_refused_by_their_key_in_every_call(scaled, wrong, key):
    async with scaled(gateway=False) as (_, _, keda):
        asked = ref(**wrong)
        calls = [
            keda.IsActive(asked),
            keda.GetMetricSpec(asked),
            keda.GetMetrics(messages.GetMetricsRequest(scaledObjectRef=asked, metricName="demand")),
            anext(aiter(keda.StreamIsActive(asked))),
            anext(aiter(keda.StreamMetricSpec(asked))),
        ]
        for call in calls:
            code, told = await refused(call)
            assert (code, f"{key}: expected" in told) == (grpc.StatusCode.INVALID_ARGUMENT, True), told


async def test_what_there_is_not_is_said_to_be_missing(scaled):
    async with scaled() as (_, _, keda):
        assert (await refused(keda.IsActive(ref(model="other"))))[0] is grpc.StatusCode.NOT_FOUND
        assert (await refused(keda.IsActive(ref(namespace="elsewhere"))))[0] is grpc.StatusCode.NOT_FOUND
        code, told = await refused(keda.GetMetrics(metrics("held_requests")))
        assert (code, "metricName" in told) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        told = await keda.GetMetricSpec(ref(scalerAddress="relight:7403", enableTLS="true"))
        assert len(told.metricSpecs) == 1
