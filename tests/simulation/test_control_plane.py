"""The controller's own loop in virtual time over generated histories: scales, failures, lost slots, store faults.

After every step no device is over-claimed; when the faults stop, the fleet becomes what was asked for,
every operation has ended, and then nothing is written any more.
"""

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from relight.controller.accept import Accept
from relight.controller.apply.changes import check_claims
from relight.controller.loop import LEASE_NAME, Hooks, Reconciler
from relight.controller.state.catalog import Catalog
from relight.controller.state.sqlite import SqliteStore
from relight.core.clock import VirtualClock
from relight.core.errors import RelightError
from relight.core.invariants import enforce
from relight.core.records import (
    Desired,
    DeviceReport,
    Endpoint,
    Failure,
    Guardians,
    InstanceReport,
    ModelSpec,
    OperationState,
    ScaleRequest,
    SlotReport,
    SourceOffer,
)
from relight.core.states import State, check_edge
from support.stores import FaultyStore

GRACE = 5.0
OFFER = SourceOffer(1, "d", "c", "l", {"shm": "unix:/s", "tcp": "tcp:x:1"}, 1, grant_key="ab")
DEVICES = tuple(DeviceReport(name, "cpu", name, 1, 0) for name in ("d0", "d1"))
# The next state on the way to what is wanted, along the edges of the table.
STEPS = {
    Desired.READY: {State.NONE: State.STARTING, State.STARTING: State.READY, State.DORMANT: State.WAKING,
                    State.WAKING: State.READY, State.DRAINING: State.READY, State.SLEEPING: State.DORMANT},
    Desired.DRAINED: {State.READY: State.DRAINING},
    Desired.DORMANT: {State.NONE: State.STARTING, State.STARTING: State.DORMANT, State.READY: State.DRAINING,
                      State.DRAINING: State.SLEEPING, State.SLEEPING: State.DORMANT, State.WAKING: State.READY},
    Desired.GONE: {State.NONE: State.GONE, State.STARTING: State.STOPPING, State.READY: State.DRAINING,
                   State.DRAINING: State.STOPPING, State.SLEEPING: State.DORMANT, State.DORMANT: State.STOPPING,
                   State.WAKING: State.READY, State.FAILED: State.STOPPING, State.STOPPING: State.GONE},
}  # fmt: skip


class Slot:
    def __init__(self, name, world):
        self.name, self.world = name, world
        self.held, self.epoch, self.revision, self.sequence = {}, 0, 0, 0
        self.states = {}
        self.failures = {}
        self.session = None

    def attach(self):
        self.session = self.world.loop.fleet.new_session()
        self.report()

    def detach(self):
        if self.session is not None:
            self.world.loop.fleet.detach(self.name, self.session)
        self.session = None

    def receive(self):
        stored = self.world.catalog.assignments.get(self.name)
        epoch = self.world.loop.lease.epoch
        if self.session is None or stored is None or epoch < self.epoch:
            return
        if (epoch, stored.record.revision) > (self.epoch, self.revision):
            self.held = {i.instance: i for i in stored.record.instances}
            self.epoch, self.revision = epoch, stored.record.revision

    def step(self):
        for name in [*self.held, *(n for n in self.states if n not in self.held)]:
            want = self.held[name].desired if name in self.held else Desired.GONE
            before = self.states.get(name, State.NONE)
            after = STEPS[want].get(before)
            if after is not None:
                check_edge(before, after)
                self.states[name] = after
                if before is not State.FAILED:
                    self.failures.pop(name, None)
        for name in [n for n, s in self.states.items() if n not in self.held and s is State.GONE]:
            del self.states[name]

    def fail(self, retry_after):
        for name, state in sorted(self.states.items()):
            if state in (State.STARTING, State.WAKING, State.READY):
                self.states[name] = State.FAILED
                self.failures[name] = Failure("injected", retry_after)
                return

    def report(self):
        if self.session is None:
            return
        self.sequence += 1
        self.world.loop.fleet.report(
            SlotReport(
                self.name, self.epoch, self.revision, self.sequence, f"a-{self.name}", "boot", "h", "x:1",
                engines={"stub": "1"}, devices=DEVICES,
                instances=tuple(self.one(n, s) for n, s in self.states.items()),
            ),
            self.session,
        )  # fmt: skip

    def one(self, name, state):
        known = self.world.known.setdefault(name, self.held.get(name))
        ready = state is State.READY
        return InstanceReport(
            name, known.model, 0, 1, known.devices, state, self.world.clock.now(), "told", 1,
            endpoint=Endpoint("http://x", "m") if ready else None,
            source=OFFER if ready else None,
            failure=self.failures.get(name),
        )  # fmt: skip


class World:
    async def open(self, directory):
        self.clock = VirtualClock()
        self.inner = SqliteStore(Path(directory) / "s.db", self.clock)
        self.store = FaultyStore(self.inner)
        self.known = {}
        self.slots = [Slot(name, self) for name in "abc"]
        await self.boot()
        for name, guardians in (("m", 1), ("n", 0)):
            spec = ModelSpec("default", name, "/m", "r1", "stub", guardians=Guardians(guardians, 2))
            await self.accept.make_known(spec)
        for slot in self.slots:
            slot.attach()

    async def boot(self):
        """A controller begins anew on the same store, as after kill -9."""
        lease = await self.inner.acquire(LEASE_NAME, "c", 1e9)
        self.catalog = Catalog(self.store)
        await self.catalog.start()
        self.loop = Reconciler(
            self.catalog, self.clock, lease, slot_grace_seconds=GRACE, gateway_grace_seconds=1.0,
            hooks=Hooks(lambda *_: None, lambda _: None, enforce),
        )  # fmt: skip
        self.accept = Accept(self.catalog, self.loop, self.clock)

    async def restart(self):
        await self.catalog.stop()
        await self.boot()
        for slot in self.slots:
            if slot.session is not None:
                slot.attach()

    async def round(self):
        self.clock.advance(1.0)
        for slot in self.slots:
            slot.receive()
            slot.step()
            slot.report()
        with suppress(RelightError):
            await self.loop.reconcile()
        check_claims(v.record for v in self.catalog.assignments.values())

    async def act(self, action, slot, number, name):
        chosen = self.slots[slot]
        if action == "scale":
            with suppress(RelightError):
                await self.accept.scale(ScaleRequest(f"default/{name}", number, "t", self.clock.now()))
        elif action == "fail":
            chosen.fail(2.0)
        elif action == "leave":
            chosen.detach()
        elif action == "return" and chosen.session is None:
            chosen.attach()
        elif action == "restart":
            await self.restart()
        elif action in ("failed", "lost-reply"):
            self.store.faults.append(action)

    async def close(self):
        await self.catalog.stop()
        await self.inner.close()


ACTIONS = st.tuples(
    st.sampled_from(["scale", "scale", "fail", "leave", "return", "restart", "failed", "lost-reply", "pass"]),
    st.integers(0, 2),
    st.integers(0, 4),
    st.sampled_from("mn"),
)


async def play(actions):
    world = World()
    with tempfile.TemporaryDirectory() as directory:
        await world.open(directory)
        try:
            for action in actions:
                await world.act(*action)
                await world.round()
            # The faults stop.
            world.store.faults.clear()
            for slot in world.slots:
                if slot.session is None:
                    slot.attach()
            for _ in range(60):
                await world.round()
            for name in "mn":
                spec = world.catalog.models[f"default/{name}"].record.spec
                own = [i for i in world.loop.snapshot().instances if i.model == spec.key and not i.remembered]
                ready = [i for i in own if i.state is State.READY and i.desired is Desired.READY]
                # Short only where every device holds a living process.
                living = sum(len(slot.states) for slot in world.slots)
                assert len(ready) == spec.replicas or living == len(DEVICES) * len(world.slots), (name, own)
            still = [v.record for v in world.catalog.operations.values() if v.record.state is OperationState.RUNNING]
            assert still == []
            before = world.catalog.revision
            for _ in range(5):
                await world.round()
            assert world.catalog.revision == before
        finally:
            await world.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=14))
def test_when_faults_stop_the_fleet_is_as_asked_and_nothing_more_is_written(actions):
    asyncio.run(play(actions))
