"""The gRPC server of the controller, and its calls to agents."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from relight.controller.autoscale.signals import Board
from relight.controller.loop import Reconciler
from relight.controller.rpc.fleet import FleetService
from relight.controller.rpc.guard import AdmitAgent
from relight.controller.rpc.routing import RoutingService
from relight.controller.rpc.scaler import ExternalScaler
from relight.controller.state.catalog import Catalog
from relight.core.auth import Tokens, hash_token
from relight.core.clock import Clock
from relight.core.errors import InvalidInput, NotFound, RelightError, Unavailable
from relight.core.records import CacheAnswer, CacheQuery
from relight.core.tls import TlsFiles
from relight.protos.client import open_channel
from relight.protos.convert import from_proto, to_proto
from relight.protos.externalscaler import externalscaler_pb2_grpc as services
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc, routing_pb2_grpc

MAX_MESSAGE_BYTES = 16 << 20
CACHE_SECONDS = 60.0
"""An agent asks every node of the ring, and waits five seconds for one that hangs."""
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed within these times, well inside a slot's grace.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two controllers must never share a port by accident.
    ("grpc.so_reuseport", 0),
)


async def serve(
    reconciler: Reconciler,
    catalog: Catalog,
    admit: AdmitAgent,
    tokens: Tokens,
    caller: Callable[[str], str],
    clock: Clock,
    address: str,
    tls: TlsFiles | None,
) -> tuple[grpc.aio.Server, int]:
    """A started server on `address` (`host:port`, port 0 picks one), and the port that it has.

    Agents attach as `admit` says, gateways by `tokens`; `caller` is what each slot's agent is told of who calls it.
    """
    server = grpc.aio.server(options=_OPTIONS)
    fleet_pb2_grpc.add_FleetServicer_to_server(FleetService(reconciler, catalog, admit, caller, clock), server)  # type: ignore[no-untyped-call]
    routing_pb2_grpc.add_RoutingServicer_to_server(  # type: ignore[no-untyped-call]
        RoutingService(reconciler.gateways, reconciler.router, tokens), server
    )
    return server, await _started(server, address, tls)


async def serve_scaler(board: Board, address: str, tls: TlsFiles | None) -> tuple[grpc.aio.Server, int]:
    """The same for KEDA, which sends no token: where there is TLS, its certificate says that it is KEDA."""
    server = grpc.aio.server(options=_OPTIONS)
    services.add_ExternalScalerServicer_to_server(ExternalScaler(board), server)  # type: ignore[no-untyped-call]
    return server, await _started(server, address, tls)


async def _started(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            certificate, private_key, authority = tls.read()
            # Both ends show a certificate of the authority: a token alone opens nothing.
            pair = [(private_key, certificate)]
            credentials = grpc.ssl_server_credentials(pair, authority, require_client_auth=True)
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: {error}") from error
    await server.start()
    return port


_LARGE = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
_ERRORS: dict[grpc.StatusCode, type[RelightError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.NOT_FOUND: NotFound,
}


class AgentCalls:
    """Calls that the controller makes to agents."""

    def __init__(self, tls: TlsFiles | None, name: str = "") -> None:
        """`name` stands in the certificate of every agent, where their addresses do not."""
        self._secret, self._tls = secrets.token_bytes(32), tls
        self._options: tuple[tuple[str, Any], ...] = (("grpc.ssl_target_name_override", name),) if name and tls else ()

    def known_by(self, slot: str) -> str:
        """What the agent of `slot` is told of its caller: the hash of a token that is for it alone."""
        return hash_token(self._token(slot))

    def _token(self, slot: str) -> str:
        return hmac.new(self._secret, slot.encode(), hashlib.sha256).hexdigest()

    def _as_caller_of(self, slot: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token(slot)}"),)

    async def cache(self, slot: str, address: str, query: CacheQuery) -> CacheAnswer:
        """What the compile-cache ring answers by way of one agent. Raises InvalidInput, NotFound, Unavailable."""
        async with open_channel(address, self._tls, (*_LARGE, *self._options)) as channel:
            stub = fleet_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]
            try:
                message = await stub.Cache(
                    to_proto(query, fleet_pb2.CacheQuery),
                    metadata=self._as_caller_of(slot),
                    timeout=CACHE_SECONDS,
                )  # fmt: skip
            except grpc.aio.AioRpcError as error:
                kind = _ERRORS.get(error.code())
                if kind is not None:
                    raise kind(error.details() or "refused") from error
                raise Unavailable(f"the agent at {address} did not answer: {error.details()}") from error
            return from_proto(message, CacheAnswer)

    async def logs(
        self, slot: str, address: str, instance: str, tail_bytes: int, *, follow: bool
    ) -> AsyncGenerator[bytes, None]:
        """The end of an instance's engine log, then what is appended while `follow`.

        Raises NotFound when the agent does not know the instance, Unavailable when it cannot be reached.
        """
        async with open_channel(address, self._tls, self._options) as channel:
            stub = fleet_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Logs(
                fleet_pb2.LogRequest(instance=instance, tail_bytes=tail_bytes, follow=follow),
                metadata=self._as_caller_of(slot),
                timeout=None if follow else 30.0,
            )
            try:
                async for chunk in call:
                    yield chunk.data
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise NotFound(f"the agent has no log of {instance}") from error
                raise Unavailable(f"the agent at {address} did not answer: {error.details()}") from error
