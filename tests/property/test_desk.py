"""Whatever happens at the front desk, nothing is counted that is not there, and none gets what is not ready."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from relight.core.clock import VirtualClock
from relight.core.errors import Unavailable
from relight.core.records import RouteModel, RouteReplica, RouteTable
from relight.gateway.desk import NEXT, Desk, Limits
from relight.gateway.table import key_of

REPLICAS = [RouteReplica(f"i-{n}", k, f"http://{n}", "s") for n in range(3) for k in (1, 2)]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(["", NEXT, "i-1"])),
        st.tuples(st.just("table"), st.lists(st.sampled_from(REPLICAS), unique=True, max_size=3), st.booleans()),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("hang up"), st.integers(0, 9)),
        st.tuples(st.just("pace")),
    ),
    max_size=25,
)


class Room:
    """One desk, its requests as tasks, and a pace that goes on when told."""

    def __init__(self) -> None:
        self.paces: list[asyncio.Future[None]] = []
        self.desk = Desk("g", Limits(held=5, hold_seconds=1e6), VirtualClock(), lambda _: None, self._sleep)
        self.tasks: list[asyncio.Task[Any]] = []
        self.open: list[RouteReplica] = []
        self.ready: set[Any] = set()
        self.revision = 0

    async def _sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self.paces.append(future)
        await future

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        for task in [t for t in self.tasks if t.done()]:
            self.tasks.remove(task)
            if task.cancelled():
                continue
            error = task.exception()
            assert error is None or isinstance(error, Unavailable)
            if error is None:
                assert key_of(task.result()) in self.ready
                self.open.append(task.result())

    async def tell(self, replicas: list[RouteReplica], can_come: bool) -> None:
        self.revision += 1
        model = RouteModel("n", "m", (), tuple(replicas), 0, can_come, None, "r")
        self.ready = {key_of(r) for r in replicas}
        self.desk.update(RouteTable(self.revision, (model,)))

    async def do(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("ask", pin):
                self.tasks.append(asyncio.create_task(self.desk.admit("n/m", pin, set(), 0.0)))
            case ("table", replicas, can_come):
                await self.tell(replicas, can_come)
            case ("finish", n) if self.open:
                self.desk.done("n/m", self.open.pop(n % len(self.open)))
            case ("hang up", n) if self.tasks:
                self.tasks[n % len(self.tasks)].cancel()
            case ("pace",):
                for future in self.paces:
                    future.done() or future.set_result(None)
        await self.settle()


@given(steps)
@settings(max_examples=200, deadline=None)
async def test_counts_equal_what_is_there_at_every_step(script: list[tuple[Any, ...]]) -> None:
    room = Room()
    await room.tell([], True)
    for step in script:
        await room.do(step)
        report = room.desk.report()
        assert sum(i.in_flight for i in report.instances) == len(room.open)
        assert sum(m.held for m in report.models) == len(room.tasks) <= 5
        assert sum(m.in_flight for m in report.models) == len(room.open)
    while room.open:
        await room.do(("finish", 0))
    for task in list(room.tasks):
        task.cancel()
    await room.settle()
    report = room.desk.report()
    assert report.instances == ()
    assert all((m.held, m.in_flight) == (0, 0) for m in report.models)
    for future in room.paces:
        future.cancel()
    await asyncio.sleep(0)


@given(st.integers(2, 5))
async def test_one_table_releases_one_request_and_each_beat_one_more(count: int) -> None:
    room = Room()
    await room.tell([], True)
    for _ in range(count):
        await room.do(("ask", ""))
    await room.tell(REPLICAS[:1], True)
    for released in range(1, count + 1):
        await room.settle()
        assert len(room.open) == released
        room.paces[-1].done() or room.paces[-1].set_result(None)
    await room.settle()
