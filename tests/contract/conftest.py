"""The store implementations under contract."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from relight.controller.state.access import RedisConfig
from relight.controller.state.redis import RedisStore
from relight.controller.state.sqlite import SqliteStore
from relight.core.clock import SystemClock, VirtualClock
from support.redisserver import RedisServer
from support.stores import FaultyStore

PREFIXES = count()


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    running = RedisServer()
    yield running
    running.close()


@pytest.fixture
def opened(request, tmp_path: Path, clock):
    """Opens the store under test, again and again over the same data; `later` lets its time go by."""
    if "sqlite" in request.getfixturevalue("kind"):
        return lambda: _sqlite(tmp_path / "state.db", clock)
    config = RedisConfig(url=request.getfixturevalue("server").url, prefix=f"t{next(PREFIXES)}")
    return lambda: RedisStore.open(config, SystemClock())


async def _sqlite(path: Path, clock: VirtualClock) -> SqliteStore:
    return SqliteStore(path, clock)


@pytest.fixture(params=["sqlite", "faulty-sqlite", "redis", "faulty-redis"])
def kind(request) -> str:
    return request.param


@pytest.fixture
async def store(kind, opened):
    inner = await opened()
    yield FaultyStore(inner) if kind.startswith("faulty") else inner
    await inner.close()


@pytest.fixture
def later(request, kind, clock, store):
    """Lets seconds go by for leases. The clock of a Redis server cannot be set: their ends are moved instead."""
    if "sqlite" in kind:
        return clock.advance

    def move(seconds: float) -> None:
        inner = store.inner if kind.startswith("faulty") else store
        client, key = request.getfixturevalue("server").client(), inner.keys["leases"]
        for name, held in client.hgetall(key).items():
            epoch, expires, holder = held.split(b":", 2)
            client.hset(key, name, b"%s:%d:%s" % (epoch, int(expires) - int(seconds * 1000), holder))

    return move
