"""Makes an assignment so: runs the stages that reconcile asks for, one transition per device at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from relight.agent.journal import InstanceRecord, Journal
from relight.agent.ledger import Claim
from relight.agent.member import Changed, Member
from relight.agent.reconcile import Action, Kind, Local, admit, reconcile
from relight.agent.stages import health
from relight.agent.stages.common import END_GRACE, RETRY_AFTER, Tools, explain
from relight.agent.stages.complete import complete
from relight.agent.stages.sleep import sleep
from relight.agent.stages.start import start
from relight.agent.stages.stop import stop
from relight.agent.stages.wake import wake
from relight.agent.supervisor.client import Exit, Running
from relight.core import failpoints
from relight.core.logs import get_logger
from relight.core.records import Assignment, InstanceAssignment, InstanceReport
from relight.core.states import State

_log = get_logger("agent.transitions")
KEPT_LOGS = 20
"""Logs of ended instances that a slot keeps."""
Stage = Callable[[Member, Tools, str], Awaitable[None]]
_STAGES: Mapping[Kind, Stage] = {Kind.START: start, Kind.WAKE: wake, Kind.SLEEP: sleep, Kind.STOP: stop}
SETTLE = 1.0
"""Seconds between becoming ready and being measured."""
Over = Callable[[Member, str, str, float], None]
"""Hears of each transition that is over: whose, its kind, how it ended (ok, failed, cut), and its seconds."""
_NO_PROCESS = frozenset({State.NONE, State.FAILED, State.GONE})


class Transitions:
    """All members of one slot. Lives on one event loop; `changed` is called after anything reportable."""

    def __init__(
        self,
        tools: Tools,
        journal: Journal,
        state_dir: Path,
        parents: Mapping[str, str],
        changed: Changed,
        over: Over,
    ) -> None:
        self._tools, self._journal, self._state_dir, self._over = tools, journal, state_dir, over
        self._parents, self._changed = parents, changed
        self.members: dict[str, Member] = {}
        self._misses: dict[str, int] = {}
        self._asides: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    # ------------------------------------------------------------------ what comes from above

    @property
    def acted_on(self) -> tuple[int, int]:
        """(highest epoch seen, revision acted on)."""
        assignment = self._journal.assignment
        return self._journal.epoch, assignment.revision if assignment else 0

    def accept(self, assignment: Assignment, received_at: float) -> bool:
        """Acts on a newer assignment; False when it is no newer. Raises Fenced for an old epoch."""
        if not admit(assignment, self._journal.epoch, self._journal.assignment):
            return False
        self._journal.accept(assignment)
        failpoints.hit("agent.apply.after-journal")
        self._hand_out(assignment, received_at)
        self.advance(received_at)
        self._changed(True)
        return True

    def _hand_out(self, assignment: Assignment, received_at: float) -> None:
        for wanted in assignment.instances:
            member = self.members.get(wanted.instance)
            if member is not None:
                if member.assignment != wanted:
                    member.assignment, member.received_at = wanted, received_at
                member.epoch, member.revision = assignment.epoch, assignment.revision

    def reports(self) -> tuple[InstanceReport, ...]:
        """Every member as it stands."""
        return tuple(m.report() for m in self.members.values())

    def claims(self) -> tuple[Claim, ...]:
        """What the ledger has to know of the members."""
        return tuple(
            Claim(m.instance, m.pid, m.assignment.devices, m.unmapped_bytes)
            for m in self.members.values()
            if m.state not in _NO_PROCESS or m.pid
        )

    @property
    def moving(self) -> bool:
        """Whether any transition is under way."""
        return any(m.task is not None for m in self.members.values())

    # ------------------------------------------------------------------ acting

    def advance(self, received_at: float | None = None) -> None:
        """Takes every step that may be taken now."""
        if self._closing:
            return
        now = self._tools.clock.now()
        assignment = self._journal.assignment
        local = [self._local(m) for m in self.members.values()]
        busy = {p for m in self.members.values() if m.task is not None for p in self._owners(m.assignment)}
        steps = reconcile(assignment, local, busy, self._parents, now)
        for action in steps.actions:
            self._take(action, now if received_at is None else received_at)
        for waiting in steps.waiting:
            member = self.members.get(waiting.instance)
            if member is not None and member.progress != waiting.reason:
                member.say(f"{waiting.kind} waits: {waiting.reason}")
        if steps.again_at is not None:
            if self._timer is not None:
                self._timer.cancel()
            delay = max(steps.again_at - now, 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self.advance)

    def _owners(self, assignment: InstanceAssignment) -> tuple[str, ...]:
        return tuple(sorted({self._parents.get(d, d) for d in assignment.devices}))

    def _local(self, member: Member) -> Local:
        return Local(
            instance=member.instance,
            state=member.state,
            parents=self._owners(member.assignment),
            epoch=member.epoch,
            revision=member.revision,
            running=member.kind,
            retry_at=member.retry_at,
        )

    def _take(self, action: Action, received_at: float) -> None:
        member = self.members.get(action.instance) or self._create(action.instance, received_at)
        if action.kind is Kind.DRAIN:
            member.move(State.DRAINING, action.cause)
            # What may follow (sleep, stop) is the next pass's business.
            asyncio.get_running_loop().call_soon(self.advance)
        elif action.kind is Kind.FORGET:
            self._forget(member)
        elif action.kind is Kind.UNDRAIN:
            if member.task is not None:
                member.task.cancel()
            member.move(State.READY, action.cause)
        else:
            self._run(member, action.kind, _STAGES[action.kind], action.cause)

    def _create(self, instance: str, received_at: float) -> Member:
        assignment = self._journal.assignment
        if assignment is None:
            raise LookupError(instance)
        wanted = next(a for a in assignment.instances if a.instance == instance)
        member = self._member(wanted, assignment.epoch, assignment.revision, received_at)
        self.members[instance] = member
        return member

    def _member(self, wanted: InstanceAssignment, epoch: int, revision: int, received_at: float) -> Member:
        return Member(
            assignment=wanted,
            directory=self._state_dir / "i" / wanted.instance,
            log_path=self.log_path(wanted.instance),
            clock=self._tools.clock,
            keep=self._journal.keep,
            changed=self._changed,
            epoch=epoch,
            revision=revision,
            received_at=received_at,
            since=self._tools.clock.now(),
            level=wanted.level,
        )

    def log_path(self, instance: str) -> Path:
        """Where the output of an instance's processes goes."""
        return self._state_dir / "logs" / f"{instance}.log"

    def _forget(self, member: Member) -> None:
        self._journal.forget(member.instance)
        self._misses.pop(member.instance, None)
        del self.members[member.instance]
        self._prune_logs()
        self._changed(True)

    def _prune_logs(self) -> None:
        """Keeps the newest logs of ended instances: why a start failed is asked after it failed."""
        ended = [p for p in (self._state_dir / "logs").glob("i-*.log") if p.stem not in self.members]
        for path in sorted(ended, key=lambda p: p.stat().st_mtime)[:-KEPT_LOGS]:
            path.unlink(missing_ok=True)

    def _run(self, member: Member, kind: Kind, stage: Stage, cause: str) -> None:
        cut = member.task
        if cut is not None:
            cut.cancel()
        member.retry_at = 0.0
        task = asyncio.create_task(self._guarded(member, kind, stage, cause, cut), name=f"{cause}:{member.instance}")
        member.task, member.kind = task, kind
        task.add_done_callback(lambda done: self._done(member, done))

    async def _guarded(
        self, member: Member, kind: Kind, stage: Stage, cause: str, cut: asyncio.Task[None] | None
    ) -> None:
        if cut is not None:
            await asyncio.wait([cut])
        begun, outcome = self._tools.clock.monotonic(), "cut"
        try:
            await stage(member, self._tools, cause)
            outcome = "failed" if member.state is State.FAILED else "ok"
        except Exception as error:  # noqa: BLE001 - a defect in a stage fails its instance, not the agent
            _log.exception("stage.defect", instance=member.instance)
            with contextlib.suppress(Exception):
                await self._tools.end(member, END_GRACE)
            member.fail(f"defect: {explain(error)}", RETRY_AFTER)
            outcome = "failed"
        finally:
            self._over(member, kind, outcome, self._tools.clock.monotonic() - begun)

    def _done(self, member: Member, done: asyncio.Task[None]) -> None:
        if member.task is done:
            member.task = member.kind = None
        if self._closing:
            return
        if member.state is State.READY:
            self._aside(self._measure(member))
            if not member.complete:
                self._aside(complete(member, self._tools))
        self._changed(True)
        self.advance()

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def _measure(self, member: Member) -> None:
        # Reading a large tree's page tables takes longer than many a wake: its first requests go first.
        await asyncio.sleep(SETTLE)
        if member.state is not State.READY or member.task is not None:
            return
        try:
            await self._tools.measure(member)
        except Exception as error:  # noqa: BLE001 - a reading that fails is taken again after the next step
            _log.warning("memory.unmeasured", instance=member.instance, reason=explain(error))
            return
        member.remember()

    # ------------------------------------------------------------------ what happens by itself

    def on_exit(self, exit_: Exit) -> None:
        """The supervisor says that a main process ended."""
        member = self.members.get(exit_.instance)
        if member is None or member.ending or member.state in _NO_PROCESS:
            return
        if member.pid not in (0, exit_.pid):
            return
        member.exit_code = exit_.code
        self._bury(member, exit_.reason)

    def _bury(self, member: Member, reason: str) -> None:
        async def stage(m: Member, tools: Tools, cause: str) -> None:
            await health.bury(m, tools, cause)

        self._run(member, Kind.STOP, stage, reason)

    async def look(self) -> None:
        """One round of health checks."""
        watched = [m for m in self.members.values() if m.state in health.WATCHED]
        found = await asyncio.gather(*(health.look(m, self._tools, self._misses) for m in watched))
        for member, reason in zip(watched, found, strict=True):
            if reason and member.state in health.WATCHED:
                self._misses.pop(member.instance, None)
                self._bury(member, reason)

    async def adopt(self, running: tuple[Running, ...], boot_id: str) -> None:
        """After the agent's own restart: what is journalled is adopted or failed, the rest ended."""
        alive = {r.instance: r for r in running}
        same_boot = self._journal.boot_id in ("", boot_id)
        self._journal.begin(boot_id)
        for record in list(self._journal.instances.values()):
            self._adopt(record, alive.pop(record.assignment.instance, None), same_boot)
        if self._journal.assignment is not None:
            # The newest intent may have been journalled after an instance's own last record.
            self._hand_out(self._journal.assignment, self._tools.clock.now())
        for stranger in alive.values():
            _log.warning("instance.unknown", instance=stranger.instance, pid=stranger.pid)
            await self._tools.spawner.end(stranger.instance, 0)
        self.advance()

    def _adopt(self, record: InstanceRecord, process: Running | None, same_boot: bool) -> None:
        member = self._member(record.assignment, record.epoch, record.revision, self._tools.clock.now())
        member.restore(record)
        self.members[member.instance] = member
        if member.state in _NO_PROCESS:
            return
        if process is None or (member.pid and (process.pid, process.start_time) != (member.pid, member.start_time)):
            if member.state is State.STARTING and not member.pid:
                return
            reason = "the engine ended while no agent watched" if same_boot else "the machine was restarted"
            self._bury(member, reason)
            return
        member.pid, member.start_time = process.pid, process.start_time
        self._tools.attach(member)
        _log.info("instance.adopted", instance=member.instance, pid=member.pid, state=member.state)

    def reattached(self, running: tuple[Running, ...], *, beside: bool = False) -> None:
        """After the supervisor's restart: whoever it does not know any more is dead.

        `beside`: it is the first process of a container, whose end is that of all that runs there.
        """
        alive = {r.instance for r in running}
        why = "the engine ended while no supervisor watched"
        if beside and not alive:
            why = "the engine's container was killed, and all that ran in it"
        for member in self.members.values():
            if member.pid and member.instance not in alive and member.state not in _NO_PROCESS:
                self._bury(member, why)

    async def close(self) -> None:
        """Stops acting; engines run on and are adopted by the next agent."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [m.task for m in self.members.values() if m.task is not None] + list(self._asides)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for member in self.members.values():
            if member.handle is not None:
                with contextlib.suppress(Exception):
                    await member.handle.close()
