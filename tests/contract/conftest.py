"""The store implementations under contract."""

from pathlib import Path

import pytest

from relight.controller.state.sqlite import SqliteStore
from relight.core.clock import VirtualClock
from support.stores import FaultyStore


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture(params=["sqlite", "faulty-sqlite"])
async def store(request, tmp_path: Path, clock):
    inner = SqliteStore(tmp_path / "state.db", clock)
    yield FaultyStore(inner) if request.param.startswith("faulty") else inner
    await inner.close()
