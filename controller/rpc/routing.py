"""Routing.Attach: one stream per gateway; demand comes in, the whole route table goes out at each change."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from relight.controller.observe.gateways import Gateways
from relight.controller.observe.routes import Router
from relight.controller.rpc.guard import authorize, refuse
from relight.core.auth import Role, Tokens
from relight.core.errors import FieldError, InvalidInput
from relight.core.ids import is_name
from relight.core.logs import get_logger
from relight.core.records import GatewayReport
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import routing_pb2, routing_pb2_grpc

log = get_logger("controller.rpc.routing")

Context = grpc.aio.ServicerContext[routing_pb2.GatewayReport, routing_pb2.RouteTable]


class RoutingService(routing_pb2_grpc.RoutingServicer):
    """Lets gateways attach."""

    def __init__(self, gateways: Gateways, router: Router, tokens: Tokens) -> None:
        self._gateways, self._router, self._tokens = gateways, router, tokens

    async def Attach(  # noqa: N802 - the name is the protocol's
        self, request_iterator: AsyncIterator[routing_pb2.GatewayReport], context: Context
    ) -> AsyncIterator[routing_pb2.RouteTable]:
        await authorize(context, self._tokens, Role.GATEWAY)
        session = self._gateways.new_session()
        names: list[str] = []
        reader = asyncio.create_task(self._read(request_iterator, session, names))
        table = None
        try:
            revision = 0
            while True:
                table = asyncio.create_task(self._router.newer_than(revision))
                done, _ = await asyncio.wait({reader, table}, return_when=asyncio.FIRST_COMPLETED)
                if reader in done:
                    await reader
                    return
                newest = table.result()
                revision = newest.revision
                yield to_proto(newest, routing_pb2.RouteTable)
        except InvalidInput as error:
            await refuse(context, error)
        finally:
            for task in filter(None, (reader, table)):
                task.cancel()
                with suppress(asyncio.CancelledError, InvalidInput, grpc.RpcError):
                    await task
            for name in names:
                log.info("gateway.detached", gateway=name)
                self._gateways.detach(name, session)

    async def _read(self, reports: AsyncIterator[routing_pb2.GatewayReport], session: int, names: list[str]) -> None:
        async for message in reports:
            report = from_proto(message, GatewayReport)
            _check(report, names)
            if not names:
                names.append(report.gateway)
                log.info("gateway.attached", gateway=report.gateway)
            self._gateways.report(report, session)


def _check(report: GatewayReport, names: list[str]) -> None:
    wrong = []
    if not is_name(report.gateway):
        wrong.append(FieldError("gateway", "a name of lower-case letters, digits, '-' and '.'", repr(report.gateway)))
    elif names and report.gateway != names[0]:
        wrong.append(FieldError("gateway", f"{names[0]!r}, the gateway of this stream", repr(report.gateway)))
    for n, model in enumerate(report.models):
        if model.held < 0 or model.in_flight < 0:
            wrong.append(FieldError(f"models.{n}", "counts of 0 or more", f"{model.held}, {model.in_flight}"))
        if not math.isfinite(model.last_request_at):
            wrong.append(FieldError(f"models.{n}.last_request_at", "a time", str(model.last_request_at)))
    if wrong:
        raise InvalidInput("not a valid GatewayReport", wrong)
