"""Serves `Agent.Logs`: the tail of an engine's log, then what is appended, to viewers and operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio

from relight.core.auth import Role, Tokens
from relight.core.errors import Denied
from relight.core.ids import is_name
from relight.protos.relight.v1 import fleet_pb2, fleet_pb2_grpc

CHUNK = 64 << 10
MAX_TAIL = 64 << 20
FOLLOW_SECONDS = 0.25
"""Between two looks at a followed file: files on every kind of mount can be read, not all tell of changes."""


class LogsServicer(fleet_pb2_grpc.AgentServicer):
    """`path` names an instance's log file; `tokens` are those that are known at the time of a call."""

    def __init__(self, path: Callable[[str], Path], tokens: Callable[[], Tokens]) -> None:
        self._path, self._tokens = path, tokens

    async def Logs(  # noqa: N802 - the name of the protocol
        self,
        request: fleet_pb2.LogRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[fleet_pb2.LogChunk]:
        """UNAUTHENTICATED, PERMISSION_DENIED, INVALID_ARGUMENT naming the field, or NOT_FOUND."""
        sent = {str(k): str(v) for k, v in context.invocation_metadata() or ()}
        try:
            self._tokens().require(sent.get("authorization"), Role.VIEWER, Role.OPERATOR)
        except Denied as error:
            code = grpc.StatusCode.PERMISSION_DENIED if error.authenticated else grpc.StatusCode.UNAUTHENTICATED
            await context.abort(code, str(error))
        if not is_name(request.instance):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "instance: expected an instance's id")
        if not 0 <= request.tail_bytes <= MAX_TAIL:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"tail_bytes: expected 0 to {MAX_TAIL}")
        try:
            log = await asyncio.to_thread(self._path(request.instance).open, "rb")
        except OSError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no log of instance {request.instance} here")
        with log:
            end = log.seek(0, 2)
            log.seek(max(0, end - request.tail_bytes))
            while True:
                data = await asyncio.to_thread(log.read, CHUNK)
                if data:
                    yield fleet_pb2.LogChunk(data=data)
                elif not request.follow:
                    return
                else:
                    await asyncio.sleep(FOLLOW_SECONDS)
