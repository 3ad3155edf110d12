"""What every route may use: the parts of the running controller, and the names that stand in paths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Path, Request

from relight.controller.accept import Accept
from relight.controller.autoscale.driver import Autoscaler
from relight.controller.loop import Reconciler
from relight.controller.metrics import Metrics
from relight.controller.rpc.server import AgentCalls
from relight.controller.specs import NAME_PATTERN
from relight.controller.state.catalog import Catalog
from relight.core.clock import Clock


class OperationWaiters:
    """Wakes those who wait for an operation to end."""

    def __init__(self, catalog: Catalog) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}
        catalog.listen(self._changed)

    def _changed(self, keys: frozenset[str]) -> None:
        for key in keys:
            kind, _, name = key.partition("/")
            if kind == "operations":
                for event in self._events.get(name, ()):
                    event.set()

    async def wait(self, operation: str, seconds: float, over: Callable[[], bool]) -> None:
        """Returns when `over()` holds, or after `seconds`."""
        event = asyncio.Event()
        self._events.setdefault(operation, set()).add(event)
        try:
            async with asyncio.timeout(seconds):
                while not over():
                    event.clear()
                    await event.wait()
        except TimeoutError:
            pass
        finally:
            self._events[operation].discard(event)
            if not self._events[operation]:
                del self._events[operation]


@dataclass(slots=True)
class Parts:
    """The running controller as the API sees it."""

    catalog: Catalog
    reconciler: Reconciler
    accept: Accept
    agents: AgentCalls
    metrics: Metrics
    autoscaler: Autoscaler
    clock: Clock
    operations_changed: OperationWaiters
    event_stream_seconds: float


def parts(request: Request) -> Parts:
    """Dependency: the running controller."""
    return cast("Parts", request.app.state.parts)


Running = Annotated[Parts, Depends(parts)]
Namespace = Annotated[str, Path(pattern=NAME_PATTERN, max_length=63, description="A namespace")]
ModelName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=63, description="A model's name")]
Id = Annotated[str, Path(pattern=NAME_PATTERN, max_length=63)]
