"""Keeps the slot's zygotes: starts them, takes over those of an earlier agent, replaces those that die or go stale.

Nothing here stops an engine from starting: whoever cannot be forked is told why, and is started the ordinary way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from relight.agent.engines.base import EngineCommand, EngineDriver, ZygoteCommand
from relight.agent.ledger import Claim
from relight.agent.link import SupervisorLink
from relight.agent.procfs import INSTANCE, OWNER, Procfs
from relight.agent.supervisor.client import Exit, Running
from relight.agent.supervisor.processes import set_aside
from relight.agent.zygotes import calls, rules
from relight.agent.zygotes.calls import Described, Stale
from relight.core.clock import Clock
from relight.core.errors import LocalFault, RelightError
from relight.core.logs import get_logger

_log = get_logger("agent.zygotes")
PREFIX = "zygote-"
IMPORT_SECONDS = 180.0
"""How long an import may take; on an idle machine it takes about ten."""
PATIENCE = 120.0
"""How long a start waits for a zygote that imports: an ordinary start would import the same, several times over."""
_LOOK = 0.1
_BACKOFF = (1.0, 5.0, 30.0, 120.0)
_GRACE = 2.0


@dataclass(slots=True, eq=False)
class _Zygote:
    engine: str
    how: ZygoteCommand
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it ended, or has to."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is known whether it can be forked from: `said` or `why`."""
    said: Described | None = None
    why: str = "the zygote was not started yet"
    exit: Exit | None = None
    pid: int = 0
    """Of the process that runs, ready or not; 0 for none that is known."""

    @property
    def instance(self) -> str:
        return PREFIX + self.engine


class Zygotes:
    """One per driver that has one."""

    def __init__(
        self, drivers: Mapping[str, EngineDriver], directory: Path, link: SupervisorLink, clock: Clock
    ) -> None:
        self._drivers, self._directory, self._link, self._clock = drivers, directory, link, clock
        self._procfs = Procfs()
        self._own: dict[str, _Zygote] = {}
        self._unprepared: dict[str, tuple[_Zygote, EngineCommand]] = {}

    # ------------------------------------------------------------------ forking

    async def fork(self, engine: str, instance: str, command: EngineCommand, log: Path) -> tuple[Running, str]:
        """Forks an engine's main process; the supervisor answers for it. Returns it, and one line about the zygote.

        Raises LocalFault with the reason why it has to be started the ordinary way; nothing is left of it then.
        """
        zygote = self._own.get(engine)
        if zygote is None:
            driver = self._drivers.get(engine)
            raise LocalFault((driver and driver.no_zygote) or "there is no zygote for this engine here")
        if why := rules.unfit(zygote.how.command.env, command.env):
            raise LocalFault(why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await zygote.settled.wait()
        said = zygote.said
        if said is None:
            raise LocalFault(zygote.why)
        set_aside(log)
        taken: list[Running] = []

        async def take(pid: int) -> None:
            taken.append(await self._link.adopt(instance, pid))

        marked = replace(command, env={**command.env, INSTANCE: instance, OWNER: self._link.owner})
        try:
            forked = await calls.fork(zygote.how.socket, marked, log, take)
        except Stale as error:
            zygote.why = str(error)
            zygote.changed.set()
            raise
        except RelightError as error:
            # The supervisor may have it already: two engines of one instance must never be.
            with contextlib.suppress(RelightError):
                await self._link.end(instance, 0)
            raise LocalFault(str(error)) from error
        if not forked.prepared:
            self._unprepared[instance] = (zygote, command)
        what = "a zygote of its model" if forked.prepared else "a zygote"
        return taken[0], f"{what} (pid {said.pid}, {said.resident_bytes >> 20} MiB imported)"

    async def shared(self, engine: str) -> str:
        """How much of its own memory an engine's zygote shares with what was forked from it, in words."""
        zygote = self._own.get(engine)
        bytes_ = await asyncio.to_thread(self._procfs.forked, zygote.pid) if zygote and zygote.pid else 0
        return f"; it shares {bytes_ >> 20} MiB with what it forked" if bytes_ else ""

    async def started(self, instance: str) -> None:
        """A forked engine serves: the next one of its model finds the model prepared."""
        zygote, command = self._unprepared.pop(instance, (None, None))
        if zygote is None or command is None or zygote.said is None:
            return
        try:
            await calls.prepare(zygote.how.socket, command, self._log(zygote))
        except LocalFault as error:
            _log.warning("zygote.unprepared", engine=zygote.engine, reason=str(error))

    def _log(self, zygote: _Zygote) -> Path:
        return self._directory.parent / "logs" / f"{zygote.instance}.log"

    def claims(self) -> tuple[Claim, ...]:
        """What the ledger has to know: zygotes hold memory of no device."""
        return tuple(Claim(z.instance, z.pid, ()) for z in self._own.values() if z.pid)

    # ------------------------------------------------------------------ keeping

    def take_over(self, running: Iterable[Running]) -> tuple[Running, ...]:
        """Those of `running` that are no zygotes. Zygotes of engines that need none any more stay among them."""
        found = tuple(running)
        # Not before: how one is started depends on what is known of where engines run.
        for name, driver in self._drivers.items():
            how = driver.zygote(self._directory / name)
            if how is not None:
                self._own[name] = _Zygote(name, how)
        for zygote in self._own.values():
            zygote.pid = next((r.pid for r in found if r.instance == zygote.instance), 0)
        own = {z.instance for z in self._own.values()}
        return tuple(r for r in found if r.instance not in own)

    def on_exit(self, exit_: Exit) -> bool:
        """Whether what ended was a zygote."""
        for zygote in self._own.values():
            if zygote.instance == exit_.instance:
                zygote.exit, zygote.pid = exit_, 0
                zygote.changed.set()
                return True
        return False

    async def keep(self, say: Callable[[], None] = lambda: None) -> None:
        """Runs for ever; `say` is called whenever one became ready or unusable."""
        async with asyncio.TaskGroup() as group:
            for zygote in self._own.values():
                group.create_task(self._keep(zygote, say))

    async def _keep(self, zygote: _Zygote, say: Callable[[], None]) -> None:
        failures = 0
        while True:
            zygote.changed.clear()
            zygote.exit = None
            try:
                zygote.said = await self._begin(zygote)
                zygote.why, failures = "", 0
                _log.info("zygote.ready", engine=zygote.engine, pid=zygote.said.pid, bytes=zygote.said.resident_bytes)
            except RelightError as error:
                zygote.why = f"the zygote did not come up: {error}"
                failures += 1
            zygote.settled.set()
            say()
            if zygote.said is not None:
                await zygote.changed.wait()
                zygote.why = zygote.why or "the zygote ended"
            zygote.said = None
            _log.warning("zygote.lost", engine=zygote.engine, reason=zygote.why)
            say()
            with contextlib.suppress(RelightError):
                await self._link.end(zygote.instance, _GRACE)
            await asyncio.sleep(_BACKOFF[min(failures, len(_BACKOFF)) - 1] if failures else 0)
            if not failures:
                # The next one is on its way: starts wait for it rather than import on their own.
                zygote.settled.clear()

    async def _begin(self, zygote: _Zygote) -> Described:
        command = zygote.how.command
        command.cwd.mkdir(mode=0o700, parents=True, exist_ok=True)
        # An earlier agent's is found by the supervisor and answers at once.
        with contextlib.suppress(LocalFault):
            said = await calls.describe(zygote.how.socket)
            zygote.pid = said.pid
            return said
        await self._link.end(zygote.instance, _GRACE)
        zygote.how.socket.unlink(missing_ok=True)
        zygote.pid = (await self._link.spawn(zygote.instance, command, self._log(zygote))).pid
        deadline = self._clock.monotonic() + IMPORT_SECONDS
        while True:
            # Its own sign that it is ready is the socket; an import has no other.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await zygote.changed.wait()
            if zygote.exit is not None:
                raise LocalFault(f"{zygote.exit.reason}; see {zygote.instance}.log")
            if zygote.how.socket.exists():
                return await calls.describe(zygote.how.socket)
            if self._clock.monotonic() > deadline:
                raise LocalFault(f"it imported for more than {IMPORT_SECONDS:g} s")
