"""An engine's log is served to those who may read it, to its tail and while it grows."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from relight.core.auth import hash_token
from relight.core.records import Desired
from relight.core.states import State
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc
from support.agent import Slot

READER = {"sha256": hash_token("rlt_reader"), "name": "reader", "roles": ["viewer"]}
OTHER = {"sha256": hash_token("rlt_other"), "name": "other", "roles": ["gateway"]}


@pytest.fixture
async def started(make_slot: Any) -> Slot:
    slot = make_slot(tokens=[READER, OTHER])
    await slot.up()
    slot.want(slot.instance("i-a", Desired.READY))
    await slot.until("i-a", State.READY)
    return slot


async def _read(slot: Slot, token: str, **request: Any) -> bytes:
    async with grpc.aio.insecure_channel(slot.address) as channel:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        call = fleet_pb2_grpc.AgentStub(channel).Logs(fleet_pb2.LogRequest(**request), metadata=metadata)
        async with asyncio.timeout(10):
            return b"".join([chunk.data async for chunk in call])


async def test_the_tail_of_a_log_is_served_to_a_viewer(started: Slot) -> None:
    whole = await _read(started, "rlt_reader", instance="i-a", tail_bytes=1 << 20)
    assert whole.startswith(b"stub engine listens on")
    assert await _read(started, "rlt_reader", instance="i-a", tail_bytes=5) == whole[-5:]


async def test_a_followed_log_goes_on_as_it_grows(started: Slot) -> None:
    log = started.directory / "state" / "logs" / "i-a.log"
    async with grpc.aio.insecure_channel(started.address) as channel:
        request = fleet_pb2.LogRequest(instance="i-a", tail_bytes=1, follow=True)
        call = fleet_pb2_grpc.AgentStub(channel).Logs(request, metadata=(("authorization", "Bearer rlt_reader"),))
        async with asyncio.timeout(10):
            assert (await call.read()).data == b"\n"
            with log.open("ab") as out:
                out.write(b"later")
            assert (await call.read()).data == b"later"
        call.cancel()


@pytest.mark.parametrize(
    ("token", "request_", "code"),
    [
        ("", {"instance": "i-a"}, grpc.StatusCode.UNAUTHENTICATED),
        ("rlt_wrong", {"instance": "i-a"}, grpc.StatusCode.UNAUTHENTICATED),
        ("rlt_other", {"instance": "i-a"}, grpc.StatusCode.PERMISSION_DENIED),
        ("rlt_reader", {"instance": "../agent"}, grpc.StatusCode.INVALID_ARGUMENT),
        ("rlt_reader", {"instance": "i-a", "tail_bytes": -1}, grpc.StatusCode.INVALID_ARGUMENT),
        ("rlt_reader", {"instance": "i-none"}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_others_and_wrong_requests_are_refused_by_status(
    started: Slot, token: str, request_: dict[str, Any], code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _read(started, token, **request_)
    assert caught.value.code() is code
