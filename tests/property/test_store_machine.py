"""Both stores against a model: a dictionary, a list of changes and a counter."""

import asyncio
import tempfile
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relight.controller.state.access import RedisConfig
from relight.controller.state.base import ABSENT, Change, Write
from relight.controller.state.redis import RedisStore
from relight.controller.state.sqlite import SqliteStore
from relight.core.clock import SystemClock, VirtualClock
from relight.core.errors import Conflict, TooOld
from support.redisserver import RedisServer

KEYS = st.sampled_from(["a/1", "a/2", "b/1", "b/\u00fc"])
WRITES = st.lists(st.builds(Write, KEYS, st.none() | st.binary(max_size=4)), min_size=1, max_size=4)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.open()
        _, self.revision = self.do(self.store.list(""))
        self.values, self.changes, self.begin, self.compacted = {}, [], self.revision, self.revision

    def open(self):
        self.store = SqliteStore(Path(self.directory.name) / "s.db", VirtualClock())

    def do(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    @rule(writes=WRITES, expected=KEYS, off=st.sampled_from([0, 0, 0, 1]))
    def commit(self, writes, expected, off):
        known = self.values.get(expected, (None, ABSENT))[1]
        try:
            revision = self.do(self.store.commit(writes, expect={expected: known + off}))
        except Conflict:
            assert off
            return
        assert not off
        for write in writes:
            self.revision += 1
            self.changes.append(Change(write.key, write.value, self.revision))
            if write.value is None:
                self.values.pop(write.key, None)
            else:
                self.values[write.key] = (write.value, self.revision)
        assert revision == self.revision

    @rule(back=st.integers(0, 5))
    def compact(self, back):
        self.do(self.store.compact(self.revision - back))
        self.compacted = max(self.compacted, self.revision - back)

    @rule()
    def reopen(self):
        self.do(self.store.close())
        self.open()

    @precondition(lambda self: self.changes)
    @rule(prefix=st.sampled_from(["", "a/", "b/"]), data=st.data())
    def watch(self, prefix, data):
        start = self.begin + data.draw(st.integers(0, self.revision - self.begin))
        wanted = [c for c in self.changes if c.revision > start and c.key.startswith(prefix)]

        async def collect():
            found, iterator = [], self.store.watch(prefix, start)
            while len(found) < len(wanted):
                found.append(await anext(iterator))
            await iterator.aclose()
            return found

        if start < self.compacted:

            async def first():
                iterator = self.store.watch(prefix, start)
                try:
                    await anext(iterator)
                except TooOld:
                    return True
                return False

            assert self.do(asyncio.wait_for(first(), 5))
        else:
            assert self.do(asyncio.wait_for(collect(), 5)) == wanted

    @invariant()
    def the_list_is_the_model(self):
        entries, revision = self.do(self.store.list(""))
        assert {e.key: (e.value, e.revision) for e in entries} == self.values
        assert revision == self.revision

    def teardown(self):
        self.do(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.directory.cleanup()


class RedisMachine(StoreMachine):
    server: RedisServer
    prefixes = count()

    def __init__(self):
        self.config = RedisConfig(url=self.server.url, prefix=f"m{next(self.prefixes)}")
        super().__init__()

    def open(self):
        self.store = self.do(RedisStore.open(self.config, SystemClock()))


@pytest.fixture(scope="module", autouse=True)
def server():
    RedisMachine.server = RedisServer()
    yield
    RedisMachine.server.close()


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
RedisMachine.TestCase.settings = StoreMachine.TestCase.settings
TestStoreMachine = StoreMachine.TestCase
TestRedisMachine = RedisMachine.TestCase
