"""What goes over the agent's stream to the controller: whole reports up, assignments down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import Message

from relight.core.clock import Clock
from relight.core.errors import Fenced, InvalidInput
from relight.core.logs import get_logger
from relight.core.records import Assignment, SlotReport
from relight.protos.client import ControllerAccess, ControllerStream
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc

_log = get_logger("agent.fleet")


def fleet_stream(
    controller: ControllerAccess,
    clock: Clock,
    report: Callable[[], SlotReport],
    accept: Callable[[Assignment, float], bool],
    hear: Callable[[Assignment], None],
) -> ControllerStream:
    """`report` builds the whole report; `accept` acts on an assignment, told when it was received; `hear` is told
    what came along, whether or not the assignment was a new one."""

    def receive(message: Message) -> None:
        received_at = clock.now()
        try:
            told = from_proto(message, Assignment)
            accept(replace(told, ring=None, host_tier=None, neighbours=None, caller=""), received_at)
            # Only here: a fenced sender's word on them counts as little. What was accepted begins after this.
            hear(told)
        except Fenced as error:
            # The report carries the higher epoch: its sender finds out by that.
            _log.warning("assignment.fenced", reason=str(error))
            stream.changed()
        except InvalidInput as error:
            _log.error("assignment.invalid", reason=str(error))

    stream = ControllerStream(
        "fleet",
        _log,
        controller,
        clock,
        fleet_pb2_grpc.FleetStub,
        lambda: to_proto(report(), fleet_pb2.SlotReport),
        receive,
    )
    return stream
