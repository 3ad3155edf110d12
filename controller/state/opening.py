"""Which store holds the state, and who of several controllers may write to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relight.controller.state.access import RedisConfig
from relight.controller.state.base import Lease, Store
from relight.controller.state.sqlite import SqliteStore
from relight.core.clock import Clock
from relight.core.errors import Conflict, FieldError, InvalidInput
from relight.core.logs import get_logger

WAIT_SECONDS = 1.0

log = get_logger("controller.state")


async def open_store(state_path: Path | None, redis: RedisConfig | None, clock: Clock) -> Store:
    """The embedded store at `state_path`, or the one of a cluster. Raises what opening it raises."""
    if redis is not None:
        # The client takes a fifth of a second to import: only where it is needed.
        from relight.controller.state.redis import RedisStore

        return await RedisStore.open(redis, clock)
    if state_path is None:
        raise InvalidInput("no store", [FieldError("state_path", "a path, or `redis` in its place", "nothing")])
    return SqliteStore(state_path, clock)


async def lead(store: Store, name: str, holder: str, ttl_seconds: float, above_epoch: int = 0) -> Lease:
    """Takes the lease; waits while another holds it, as a stand-by does. Raises Unavailable."""
    told = False
    while True:
        try:
            return await store.acquire(name, holder, ttl_seconds, above_epoch=above_epoch)
        except Conflict as error:
            if not told:
                log.info("lead.waiting", reason=str(error))
                told = True
            await asyncio.sleep(WAIT_SECONDS)
