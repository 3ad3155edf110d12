"""TLS by configuration: REST and gRPC answer nobody in plain text, and gRPC nobody without a certificate."""

import asyncio
import ssl

import grpc
import httpx
import pytest

from relight.controller.cli.pki import make
from relight.controller.config import ControllerConfig
from relight.controller.runtime import Controller
from relight.core.errors import InvalidInput
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc
from support.controlplane import CLOCK, DEADLINE, TOKENS, configuration, model


@pytest.fixture
async def secured(tmp_path):
    make(tmp_path / "pki", ("controller", "agent"), CLOCK)
    files = {
        "certificate": str(tmp_path / "pki" / "controller.pem"),
        "private_key": str(tmp_path / "pki" / "controller.key"),
        "authority": str(tmp_path / "pki" / "ca.pem"),
    }
    listen = {"port": 0, "tls": files}
    settings = configuration(tmp_path, http=listen, grpc=listen, models=[model()])
    controller = Controller(ControllerConfig.model_validate(settings), CLOCK)
    addresses = await controller.start()
    yield tmp_path / "pki", addresses
    await controller.stop()


async def first_assignment(channel):
    async def send():
        yield fleet_pb2.SlotReport(slot="a", agent="x", sequence=1)
        await asyncio.Event().wait()

    async with channel, asyncio.timeout(DEADLINE):
        call = fleet_pb2_grpc.FleetStub(channel).Attach(
            send(), metadata=(("authorization", f"Bearer {TOKENS['agent']}"),)
        )
        found = await call.read()
        call.cancel()
        return found


async def test_an_agent_with_a_certificate_attaches_and_others_do_not(secured):
    directory, addresses = secured
    authority = (directory / "ca.pem").read_bytes()
    own = (directory / "agent.key").read_bytes(), (directory / "agent.pem").read_bytes()
    trusted = grpc.aio.secure_channel(addresses.grpc, grpc.ssl_channel_credentials(authority, *own))
    assert (await first_assignment(trusted)).slot == "a"
    for channel in (
        grpc.aio.insecure_channel(addresses.grpc),
        grpc.aio.secure_channel(addresses.grpc, grpc.ssl_channel_credentials(authority)),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await first_assignment(channel)


async def test_rest_answers_over_tls_alone(secured):
    directory, addresses = secured
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    async with httpx.AsyncClient(verify=context) as client:
        assert (await client.get(f"https://{addresses.http}/livez")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await client.get(f"http://{addresses.http}/livez")


async def test_a_missing_certificate_file_is_named_and_nothing_stays_open(tmp_path):
    files = {name: str(tmp_path / "none.pem") for name in ("certificate", "private_key", "authority")}
    settings = configuration(tmp_path, grpc={"port": 0, "tls": files})
    with pytest.raises(InvalidInput, match=r"tls\.certificate"):
        await Controller(ControllerConfig.model_validate(settings), CLOCK).start()
    # The state is free again.
    controller = Controller(ControllerConfig.model_validate(configuration(tmp_path)), CLOCK)
    await controller.start()
    await controller.stop()
