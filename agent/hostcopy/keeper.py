"""Keeps the slot's copies as they are wanted: starts them, takes over an earlier agent's, ends what is not wanted.

Each is a process under the supervisor, so that it outlives the agent and every engine. Nothing here stops an engine
from starting: a copy that cannot be kept is told with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from relight.agent import ledger
from relight.agent.engines.base import EngineCommand
from relight.agent.hostcopy import calls
from relight.agent.hostcopy.budget import Claim, choose
from relight.agent.hostcopy.calls import EMPTY, Said
from relight.agent.hostcopy.orders import CONTROL, PAGES, READABLE, Fill
from relight.agent.hostcopy.prefetch import Prefetcher
from relight.agent.link import SupervisorLink
from relight.agent.storage.checkpoints import Checkpoints
from relight.agent.supervisor.client import Exit, Running
from relight.core.clock import Clock
from relight.core.errors import LocalFault, RelightError
from relight.core.hosting import PREFIX, room_for
from relight.core.ids import is_name
from relight.core.logs import get_logger
from relight.core.records import HostCopyReport, HostReport, HostState, HostTier, HostWanted
from relight.core.tls import TlsFiles

_log = get_logger("agent.hostcopy")
UP_SECONDS = 30.0
"""How long its process may take until it answers: an interpreter and a few modules."""
_LOOK, _REST = 0.1, 15.0
"""Seconds between two looks while something moves, and while nothing does."""
_BACKOFF = (1.0, 5.0, 30.0, 120.0)
_GRACE = 2.0
_MISSES = 3
"""Looks in a row that a process may leave without an answer: a busy machine must not cost a copy."""
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """`directory` is private to the agent; copies are read at `host`. A budget of 0 keeps none."""

    directory: Path
    budget_bytes: int
    host: str
    tls: TlsFiles | None = None
    source_rate: int | None = None


@dataclass(slots=True, eq=False)
class _Copy:
    name: str
    wanted: HostWanted | None = None
    turn: int = 0
    running: bool = False
    pid: int = 0
    said: Said | None = None
    why: str = ""
    """Why it is not kept, or its last try failed."""
    failures: int = 0
    retry_at: float = 0.0
    asked: bool = False
    """Whether this agent asked it to read, and was not told yet how that ended."""
    misses: int = 0
    told: bool = False
    """Whether the controller can know of it."""
    dropped: bool = False
    """Whether the controller knew of it and wants it no more: one that it never heard of may be the last there is."""

    @property
    def read(self) -> bool:
        """Whether somebody copies or maps it now."""
        return self.said is not None and self.said.readers > 0

    @property
    def bytes(self) -> int:
        """What it takes, or what is set aside for it."""
        if self.said is not None and self.said.ready:
            return self.said.bytes
        return room_for(self.wanted.bytes) if self.wanted else 0


class HostCopies:
    """All calls come from one event loop."""

    def __init__(
        self, settings: TierSettings, link: SupervisorLink, clock: Clock, changed: Callable[[], None] = lambda: None
    ) -> None:
        """`changed` is told whenever `report` would differ."""
        self._settings, self._link, self._clock, self._changed = settings, link, clock, changed
        self._copies: dict[str, _Copy] = {}
        self._turns = 0
        self._wake = asyncio.Event()
        self._told: HostReport | None = None
        self.checkpoints: Checkpoints | None = None
        """Of remote storage, in the same budget; None where it is 0."""
        if settings.budget_bytes:
            self.checkpoints = Checkpoints(settings.directory.parent / "storage", self._left, clock)
        self._ahead = Prefetcher(self._left, changed, self.checkpoints)

    # ------------------------------------------------------------------ told and telling

    def take_over(self, running: Iterable[Running]) -> tuple[Running, ...]:
        """Those of `running` that are no copies; copies of an earlier agent are kept until one hears what is wanted."""
        others = []
        for process in running:
            if process.instance.startswith(PREFIX):
                self._copies[process.instance] = _Copy(process.instance, running=True, pid=process.pid)
            else:
                others.append(process)
        return tuple(others)

    def hear(self, tier: HostTier) -> None:
        """The controller's word on what this slot keeps. What is not named goes."""
        if not self._settings.budget_bytes:
            return
        named = {w.copy: w for w in tier.wanted if w.copy.startswith(PREFIX) and is_name(w.copy)}
        for name, wanted in named.items():
            copy = self._copies.setdefault(name, _Copy(name))
            if copy.wanted is None:
                self._turns += 1
                copy.turn = self._turns
            elif copy.wanted.rungs != wanted.rungs:
                # Somebody else to read from, or a new grant: no need to wait out a failure.
                copy.retry_at = 0.0
            copy.wanted, copy.dropped = wanted, False
        self._ahead.hear(tier.prefetch)
        for name, copy in self._copies.items():
            if name not in named:
                copy.wanted, copy.dropped = None, copy.told
        self._wake.set()

    def on_exit(self, exit_: Exit) -> bool:
        """Whether what ended was a copy."""
        copy = self._copies.get(exit_.instance)
        # One that was ended here is marked so before it ends.
        if copy is not None and copy.running:
            copy.running, copy.said = False, None
            self._failed(copy, exit_.reason.replace("engine", "copy"))
            self._wake.set()
        return exit_.instance.startswith(PREFIX)

    def report(self) -> HostReport | None:
        """As it stands; None where no memory is set aside."""
        if not self._settings.budget_bytes:
            return None
        shown = []
        for _, copy in sorted(self._copies.items()):
            if (said := _shown(copy)) is not None:
                shown.append(said)
                copy.told = True
        return HostReport(self._settings.budget_bytes, tuple(shown), self._ahead.reports())

    def claims(self) -> tuple[ledger.Claim, ...]:
        """What the ledger has to know: copies hold memory of no device."""
        return tuple(ledger.Claim(c.name, c.pid, ()) for c in self._copies.values() if c.running and c.pid)

    def _left(self) -> int:
        checkpoints = self.checkpoints.bytes if self.checkpoints else 0
        return self._settings.budget_bytes - checkpoints - sum(c.bytes for c in self._copies.values())

    # ------------------------------------------------------------------ keeping

    async def begin(self) -> None:
        """Asks those of an earlier agent what they are: the first report has to name them."""
        for copy in self._copies.values():
            await self._hear_of(copy)

    async def keep(self) -> None:
        """Runs for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ahead.keep())
            group.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rest()):
                    await self._wake.wait()

    def _rest(self) -> float:
        if any(c.said is not None and c.said.state == HostState.FILLING for c in self._copies.values()):
            return _LOOK
        if any(c.misses for c in self._copies.values()):
            return 1.0
        now = self._clock.monotonic()
        due = [c.retry_at - now for c in self._copies.values() if c.wanted and c.why and c.retry_at]
        return min([_REST, *(max(d, _LOOK) for d in due)])

    async def look(self) -> None:
        """Makes the copies so, as far as it can be done now."""
        # The controller may name another one while these are asked.
        for copy in tuple(self._copies.values()):
            await self._hear_of(copy)
        for copy in self._unfit():
            await self._end(copy)
        if self.checkpoints is not None and self._left() < 0:
            self.checkpoints.shed()
        for name in [n for n, c in self._copies.items() if c.wanted is None and not c.running]:
            del self._copies[name]
        for copy in sorted(self._copies.values(), key=lambda c: (c.turn, c.name)):
            if self._due(copy):
                await self._try(copy)
        told = self.report()
        if told != self._told:
            self._told = told
            self._changed()

    async def _hear_of(self, copy: _Copy) -> None:
        if not copy.running:
            return
        try:
            copy.said = await calls.describe(self._socket(copy))
        except LocalFault as error:
            copy.misses += 1
            if copy.misses >= _MISSES:
                await self._end(copy)
                self._failed(copy, str(error))
            return
        copy.misses = 0
        if copy.said.ready:
            copy.why, copy.failures, copy.retry_at = "", 0, 0.0
        elif copy.said.state == HostState.FAILED and copy.asked:
            self._failed(copy, copy.said.reason)

    def _unfit(self) -> list[_Copy]:
        """Copies that run and shall not: unwanted, or above the budget."""
        budget = self._settings.budget_bytes
        staying = [c for c in self._copies.values() if budget and (c.wanted is not None or not c.dropped)]
        choice = choose((Claim(c.name, c.bytes, c.turn) for c in staying), budget)
        for copy in staying:
            if copy.name in choice.refused:
                copy.why, copy.retry_at = choice.refused[copy.name], 0.0
            elif copy.why and not copy.retry_at:
                copy.why = ""
        # The pages of one that is mapped would stay, whoever ends it: it goes after its last reader.
        return [c for c in self._copies.values() if c.running and not c.read and c.name not in choice.kept]

    def _due(self, copy: _Copy) -> bool:
        if copy.wanted is None or not copy.wanted.rungs or (copy.why and not copy.retry_at):
            return False
        if copy.said is not None and copy.said.state in (HostState.FILLING, HostState.READY):
            return False
        return self._clock.monotonic() >= copy.retry_at

    async def _try(self, copy: _Copy) -> None:
        wanted = copy.wanted
        if wanted is None:
            return
        rungs = tuple(r for r in wanted.rungs if r.kind.transport in READABLE and r.source is not None)
        try:
            if not rungs:
                raise LocalFault("no rung by shm or tcp is open")
            if not copy.running:
                copy.why, copy.retry_at = "", 0.0
                await self._start(copy)
            order = Fill(wanted.content, room_for(wanted.bytes), rungs)
            copy.asked, copy.why, copy.retry_at = True, "", 0.0
            copy.said = await calls.fill(self._socket(copy), order)
            _log.info("hostcopy.filling", copy=copy.name, model=wanted.content.model, reason=wanted.reason)
        except RelightError as error:
            # One whose process ended was counted by that.
            counted = bool(copy.why) and not copy.running
            await self._end(copy)
            if not counted:
                self._failed(copy, str(error))

    async def _start(self, copy: _Copy) -> None:
        directory = self._directory(copy)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket(copy).unlink(missing_ok=True)
        own = self._settings
        argv = [
            sys.executable, "-m", "relight.agent.hostcopy", "--name", copy.name, "--directory", str(directory),
            "--host", own.host,
        ]  # fmt: skip
        if own.source_rate is not None:
            argv += ["--source-rate", str(own.source_rate)]
        if own.tls is not None:
            argv += ["--tls", str(own.tls.certificate), str(own.tls.private_key), str(own.tls.authority)]
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        log = self._settings.directory.parent / "logs" / f"{copy.name}.log"
        copy.pid = (await self._link.spawn(copy.name, EngineCommand(tuple(argv), env, directory), log)).pid
        copy.running = True
        deadline = self._clock.monotonic() + UP_SECONDS
        while not self._socket(copy).exists():
            if not copy.running:
                raise LocalFault(f"{copy.why}; see {copy.name}.log")
            if self._clock.monotonic() > deadline:
                raise LocalFault(f"its process did not listen within {UP_SECONDS:g} s")
            await asyncio.sleep(_LOOK / 5)

    async def _end(self, copy: _Copy) -> None:
        copy.running, copy.said, copy.misses = False, None, 0
        with contextlib.suppress(RelightError):
            await self._link.end(copy.name, _GRACE)
        directory = self._directory(copy)
        for left in (directory / CONTROL, directory / PAGES):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory.rmdir()

    def _failed(self, copy: _Copy, reason: str) -> None:
        copy.asked = False
        copy.failures += 1
        copy.why = reason
        copy.retry_at = self._clock.monotonic() + _BACKOFF[min(copy.failures, len(_BACKOFF)) - 1]
        _log.warning("hostcopy.failed", copy=copy.name, reason=reason)

    def _directory(self, copy: _Copy) -> Path:
        # The paths of sockets are short.
        return self._settings.directory / copy.name.removeprefix(PREFIX)

    def _socket(self, copy: _Copy) -> Path:
        return self._directory(copy) / CONTROL


def _shown(copy: _Copy) -> HostCopyReport | None:
    said = copy.said
    if said is not None and said.content is not None and said.ready:
        return HostCopyReport(copy.name, said.content, HostState.READY, "", said.bytes, said.source)
    content = copy.wanted.content if copy.wanted else said.content if said else None
    if content is None:
        return None
    if copy.why or (said is not None and said.state == HostState.FAILED):
        return HostCopyReport(copy.name, content, HostState.FAILED, copy.why or (said.reason if said else ""))
    if said is None or said.state == EMPTY:
        why = "" if copy.wanted and copy.wanted.rungs else "nobody is there to read it from"
        return HostCopyReport(copy.name, content, HostState.FILLING, why)
    # In steps: each change is a report of its own.
    share = 10 * said.placed // said.total if said.total else 0
    return HostCopyReport(copy.name, content, HostState.FILLING, f"{10 * share} %", copy.bytes)
