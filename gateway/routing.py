"""What goes over the gateway's stream to the controller: whole reports up, the route table down."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import Message

from relight.core.clock import Clock
from relight.core.errors import InvalidInput
from relight.core.logs import get_logger
from relight.core.records import GatewayReport, RouteTable
from relight.protos.client import ControllerAccess, ControllerStream
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import routing_pb2, routing_pb2_grpc

_log = get_logger("gateway.routing")


def routing_stream(
    controller: ControllerAccess,
    clock: Clock,
    report: Callable[[], GatewayReport],
    update: Callable[[RouteTable], None],
) -> ControllerStream:
    """`report` builds the whole report; `update` takes a table, which stays in force while detached."""

    def receive(message: Message) -> None:
        try:
            update(from_proto(message, RouteTable))
        except InvalidInput as error:
            _log.error("table.invalid", reason=str(error))

    return ControllerStream(
        "routing",
        _log,
        controller,
        clock,
        routing_pb2_grpc.RoutingStub,
        lambda: to_proto(report(), routing_pb2.GatewayReport),
        receive,
    )
