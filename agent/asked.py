"""Serves all of `Agent`: logs, and what is asked of the compile-cache ring through this agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from relight.agent.cache import asking
from relight.agent.cache.ring import Ring
from relight.agent.logs import LogsServicer
from relight.core.auth import Role, Tokens
from relight.core.errors import Denied, InvalidInput, NotFound, RelightError
from relight.core.records import CacheQuery
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import fleet_pb2


class AgentServicer(LogsServicer):
    """`ring` is None where no cache node runs."""

    def __init__(self, path: Callable[[str], Path], tokens: Callable[[], Tokens], ring: Ring | None) -> None:
        super().__init__(path, tokens)
        self._ring = ring

    async def Cache(  # noqa: N802 - the name of the protocol
        self,
        request: fleet_pb2.CacheQuery,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> fleet_pb2.CacheAnswer:
        """Viewers and operators may ask, operators release. UNAVAILABLE where there is no ring, or it does not
        answer."""
        sent = {str(k): str(v) for k, v in context.invocation_metadata() or ()}
        try:
            roles = (Role.OPERATOR,) if request.operation == "release" else (Role.VIEWER, Role.OPERATOR)
            self._tokens().require(sent.get("authorization"), *roles)
            if self._ring is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "no cache node runs here")
            query = from_proto(request, CacheQuery)
            return to_proto(await asyncio.to_thread(asking.answer, self._ring, query), fleet_pb2.CacheAnswer)
        except Denied as error:
            code = grpc.StatusCode.PERMISSION_DENIED if error.authenticated else grpc.StatusCode.UNAUTHENTICATED
            await context.abort(code, str(error))
        except InvalidInput as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except NotFound as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except RelightError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError  # `abort` raises
