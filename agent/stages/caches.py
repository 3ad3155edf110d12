"""The compile-cache ring around a start: before the engine is spawned, and once it serves or has failed.

`prepare` takes part in the start and in its deadline; what follows a start runs beside it and delays nobody. A start
that was adopted after the agent's death has nothing prepared, and goes on without. Whatever fails here, the engine
compiles for itself, into a directory of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relight.agent.cache.install import clear
from relight.agent.cache.service import CacheService
from relight.agent.cache.start import SETTLE_SECONDS, CacheRecord, Prepared
from relight.agent.engines.base import EngineCommand
from relight.core.errors import RelightError
from relight.core.logs import get_logger
from relight.core.records import Mode, StartCache
from relight.core.states import State

if TYPE_CHECKING:
    from relight.agent.member import Member
    from relight.agent.stages.common import Recorder, Tools

_log = get_logger("agent.caches")
USES = frozenset({Mode.LAZY, Mode.NORMAL})
"""Modes whose starts ask the ring. The others compile for themselves: they are what these are measured against."""
WAIT_SHARE = 0.5
"""How much of a start's remaining time another's compile may be waited for: then there is time left to compile."""
CUT_SECONDS = 10.0
"""How long the end of a start waits for what prepares it: a node that hangs is given up on after half of that."""
Judge = Callable[[str], CacheRecord]
THREADS = 64
"""Starts of one agent that may wait at a time; waiting costs nothing but the thread."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A start that was prepared, by the member's incarnation."""

    prepared: Prepared
    incarnation: int


class Caches:
    """One per agent. Without a service every start compiles for itself."""

    def __init__(self, service: CacheService | None = None) -> None:
        self._service = service
        self._begun: dict[str, _Begun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(THREADS, "relight-cache-start") if service else None

    async def prepare(self, member: Member, tools: Tools, record: Recorder, command: EngineCommand) -> EngineCommand:
        """The command with its compile caches in place. Raises nothing of its own."""
        context = tools.context(member)
        member.exit_code = None
        service, threads = self._service, self._threads
        if member.assignment.mode not in USES or service is None or threads is None:
            await asyncio.to_thread(clear, context.compile_root)
            return command
        left = member.received_at + member.assignment.deadline_seconds - tools.clock.now()
        wait = min(service.settings.wait_seconds, max(left, 0.0) * WAIT_SHARE)
        driver, loop, stopped = tools.driver(member), asyncio.get_running_loop(), threading.Event()

        def waits(holder: str) -> bool:
            if not stopped.is_set():
                loop.call_soon_threadsafe(member.say, f"waits for {holder}, which compiles the same")
            return not stopped.is_set()

        try:
            start = await driver.compile_start(context, command)
            why = "this engine has no compile caches"
        except RelightError as error:
            start, why = None, f"no bundle: {error}"
        if start is None:
            await asyncio.to_thread(clear, context.compile_root)
            record.mark("cache", why)
            return command

        def work() -> Prepared:
            return service.cache.prepare(start, context.compile_root, wait, waits)

        future = loop.run_in_executor(threads, work)
        try:
            prepared = await asyncio.shield(future)
        except asyncio.CancelledError:
            # Nothing should be written into the instance's directory after its start has ended.
            stopped.set()
            await asyncio.wait({future}, timeout=CUT_SECONDS)
            future.add_done_callback(lambda done: self._late(member, done))
            raise
        self._begun[member.instance] = _Begun(prepared, member.incarnation)
        record.mark("cache", _said(prepared.record))
        return replace(command, env={**command.env, **prepared.environment})

    def _late(self, member: Member, done: asyncio.Future[Prepared]) -> None:
        """A start was cut while it was prepared: what it got is given back."""
        service = self._service
        if service is not None and not done.cancelled() and done.exception() is None:
            found = done.result()
            self._after(member, lambda log: service.cache.abandon(found, log, None), None, "failed")

    def ended(self, member: Member) -> None:
        """The start is over, well or not: what became of it is found out beside everything else."""
        begun, service = self._begun.pop(member.instance, None), self._service
        if begun is None or service is None:
            return
        if member.state in (State.READY, State.DORMANT):
            # An engine that serves before it has warmed up goes on compiling for as long as others wait for it.
            settle = max(SETTLE_SECONDS, service.settings.wait_seconds)
            self._after(
                member, lambda log: service.cache.finish(begun.prepared, log, settle), begun.incarnation, "compiled"
            )  # fmt: skip
        else:
            code = member.exit_code
            self._after(
                member, lambda log: service.cache.abandon(begun.prepared, log, code), begun.incarnation, "failed"
            )

    def _after(self, member: Member, judge: Judge, incarnation: int | None, verdict: str) -> None:
        task = asyncio.create_task(self._judge(member, judge, incarnation, verdict), name=f"cache:{member.instance}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _judge(self, member: Member, judge: Judge, incarnation: int | None, verdict: str) -> None:
        def work() -> CacheRecord:
            try:
                log = member.log_path.read_text(errors="replace")
            except OSError:
                log = ""
            return judge(log)

        if self._service is None or self._threads is None:
            return
        found = told(await asyncio.get_running_loop().run_in_executor(self._threads, work), verdict)
        _log.info("cache.judged", instance=member.instance, verdict=found.verdict, reason=found.reason)
        if incarnation is None:
            return
        self._service.count(found)
        start = member.start
        if start is not None and start.incarnation == incarnation and member.state is not State.GONE:
            member.start = replace(start, cache=found)
            member.remember()

    async def close(self) -> None:
        """Nothing is waited for; engines that still write are not published."""
        for task in self._tasks:
            task.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def told(record: CacheRecord, verdict: str) -> StartCache:
    """A cache's record as it is reported; `verdict` is that of a start which could not be judged."""
    seen = record.outcome
    return StartCache(
        key=record.key,
        verdict=str(seen.verdict) if seen else verdict,
        reason=f"{record.reason}; {seen.reason}" if seen else record.reason,
        bundle=record.bundle,
        installed=record.installed.files if record.installed else 0,
        selected=bool(seen and seen.selected),
        hit=bool(seen and seen.hit),
        compiled=seen.compiled if seen else 0,
        waited_seconds=record.waited,
        fetched_seconds=record.fetched,
        saved_seconds=record.saved,
        changed=tuple(map(str, record.changed)),
        published=record.published,
        not_published=record.not_published,
        quarantined=record.quarantined,
    )


def _said(record: CacheRecord) -> str:
    """A phase's detail."""
    waited = f"waited {record.waited:.1f} s for another's compile; " if record.waited else ""
    if record.installed is None:
        return f"{waited}compiles: {record.reason}"
    installed = record.installed
    left = "".join(f"; {kind} left out: {why}" for kind, why in installed.left_out.items())
    size = f"{installed.files} files, {installed.bytes >> 10} KiB"
    return f"{waited}{size} {record.reason}, {record.fetched:.3f} s{left}"
