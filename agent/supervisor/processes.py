"""The engine process trees that a supervisor owns: spawn, adopt, notice exits, end whole trees.

Standard library only, one thread, no waiting: `tick` is called by the server whenever something may have
happened and says when it wants to be called again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relight.agent.linelog import LineLog
from relight.agent.procfs import INSTANCE, OWNER, Procfs
from relight.agent.supervisor.memory import oom_kills
from relight.core.clock import Clock
from relight.core.errors import Conflict, FieldError, InvalidInput, NotFound
from relight.core.logs import get_logger

_log = get_logger("supervisor")
KIND, VERSION = "relight-supervisor", 1
LOG_LIMIT = 64 << 20
"""An engine log larger than this is set aside as `<name>.1` before the next start."""
_RESCAN = 0.02
"""Seconds between two looks at a tree that was sent SIGKILL: dying takes the kernel a moment."""


@dataclass(slots=True, eq=False)
class Main:
    """The main process of one instance. `deadline` (monotonic) is when SIGTERM's grace ends.

    `process` is None for one that was not spawned here: forked from a zygote, or an earlier supervisor's.
    """

    instance: str
    pid: int
    start_time: int
    process: subprocess.Popen[bytes] | None
    pidfd: int
    exited: bool = False
    code: int | None = None
    deadline: float | None = None
    killed: set[int] = field(default_factory=set)
    oom_kills: int | None = None
    """The container's counter when this one began."""
    out_of_memory: bool = False
    """It was killed, and the kernel had killed for want of memory meanwhile."""


class Processes:
    """All instances of one supervisor. `on_exit` hears of a main once its whole tree is gone."""

    def __init__(
        self, journal: Path, clock: Clock, on_exit: Callable[[Main], None], procfs: Procfs | None = None
    ) -> None:
        """Opens the journal and adopts what lives. Raises InvalidInput for a newer journal."""
        self._clock, self._on_exit, self._procfs = clock, on_exit, procfs or Procfs()
        # Derived, not stored: strays must be recognisable even when the journal itself is lost.
        self.owner = hashlib.sha256(str(journal.resolve()).encode()).hexdigest()[:16]
        self._mains: dict[str, Main] = {}
        self._journal = LineLog(journal, KIND, VERSION)
        for damage in self._journal.damage:
            _log.warning("journal.damaged", at=damage)
        self._adopt()

    # ------------------------------------------------------------------ what is asked for

    def spawn(self, instance: str, argv: list[str], env: dict[str, str], cwd: str, log: str) -> Main:
        """Starts an instance's main process. Raises Conflict when it has one, InvalidInput for paths."""
        if instance in self._mains:
            raise Conflict(f"instance {instance} already has process {self._mains[instance].pid}")
        log_path = Path(log)
        set_aside(log_path)
        marked = {**env, INSTANCE: instance, OWNER: self.owner}
        try:
            with open(log_path, "ab", opener=_private) as out:
                process = subprocess.Popen(
                    argv, env=marked, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise InvalidInput(
                f"instance {instance} cannot be started",
                [FieldError("argv, cwd or log", "usable paths", f"{error.filename}: {error.strerror}")],
            ) from error
        stat = self._procfs.stat(process.pid)
        # Our own child keeps its number until it is reaped here: the reading cannot be of another process.
        start_time = stat.start_time if stat else 0
        main = Main(instance, process.pid, start_time, process, os.pidfd_open(process.pid))
        self._own(main)
        _log.info("process.spawned", instance=instance, pid=main.pid)
        return main

    def adopt(self, instance: str, pid: int) -> Main:
        """Answers from now on for a process that was forked elsewhere and carries this instance's marks.

        Raises Conflict when the instance has a process, NotFound when there is none of that number, InvalidInput when
        it is not of this instance and supervisor.
        """
        if instance in self._mains:
            raise Conflict(f"instance {instance} already has process {self._mains[instance].pid}")
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError, OverflowError):
            raise NotFound(f"no process {pid}") from None
        # Read after the handle is open: whatever the number meant before, now it is this process's.
        stat, marks = self._procfs.stat(pid), self._procfs.environ(pid)
        if stat is None or stat.dead or (marks.get(INSTANCE), marks.get(OWNER)) != (instance, self.owner):
            os.close(pidfd)
            told = f"{marks.get(INSTANCE)} of {marks.get(OWNER)}"
            raise InvalidInput(
                "not this instance's process", [FieldError("pid", f"marked {instance} of {self.owner}", told)]
            )
        main = Main(instance, pid, stat.start_time, None, pidfd)
        self._own(main)
        _log.info("process.taken", instance=instance, pid=pid)
        return main

    def _own(self, main: Main) -> None:
        main.oom_kills = oom_kills()
        self._mains[main.instance] = main
        self._journal.append(
            {
                "boot": self._procfs.boot_id(),
                "instance": main.instance,
                "pid": main.pid,
                "start_time": main.start_time,
            },
            sync=True,
        )

    def get(self, instance: str) -> Main:
        """Raises NotFound when no such instance lives."""
        try:
            return self._mains[instance]
        except KeyError:
            raise NotFound(f"no process of instance {instance}") from None

    def all(self) -> list[Main]:
        """Every instance whose tree is not gone yet."""
        return list(self._mains.values())

    def signal(self, instance: str, number: int) -> None:
        """Sends one signal to the main process. Raises NotFound, or InvalidInput for no such signal."""
        main = self.get(instance)
        try:
            signal.pidfd_send_signal(main.pidfd, signal.Signals(number))
        except ValueError:
            raise InvalidInput("bad signal", [FieldError("signal", "a signal number", str(number))]) from None
        except ProcessLookupError:
            raise NotFound(f"the process of instance {instance} is gone") from None

    def end(self, instance: str, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL to the whole tree after `grace_seconds`; `on_exit` tells when it is done."""
        main = self.get(instance)
        deadline = self._clock.monotonic() + grace_seconds
        if main.deadline is None or deadline < main.deadline:
            main.deadline = deadline
        if not main.exited and grace_seconds > 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(main.pidfd, signal.SIGTERM)

    # ------------------------------------------------------------------ what happened

    def tick(self) -> float | None:
        """Reaps, kills what must go, tells of the gone. Returns seconds until its next turn, or None."""
        self._reap()
        now = self._clock.monotonic()
        wants: list[float] = []
        for main in self.all():
            if not main.exited and main.process is None and not self._procfs.alive(main.pid, main.start_time):
                main.exited = True
            if not main.exited and (main.deadline is None or now < main.deadline):
                if main.deadline is not None:
                    wants.append(main.deadline - now)
                continue
            if self._kill_tree(main):
                wants.append(_RESCAN)
            else:
                self._gone(main)
        return min(wants, default=None)

    def _kill_tree(self, main: Main) -> int:
        living = self._procfs.tree(main.instance, main.pid, self.owner)
        for stat in living:
            main.killed.add(stat.pid)
            _kill(stat.pid)
        return len(living) or int(not main.exited)

    def _gone(self, main: Main) -> None:
        del self._mains[main.instance]
        self._journal.append({"gone": main.instance})
        now = oom_kills()
        if main.code in (None, -signal.SIGKILL) and main.deadline is None and now is not None:
            main.out_of_memory = main.oom_kills is not None and now > main.oom_kills
        main.killed.discard(main.pid)
        killed = sorted(main.killed)
        _log.info("process.gone", instance=main.instance, pid=main.pid, code=main.code, killed=killed)
        self._on_exit(main)
        os.close(main.pidfd)

    def _reap(self) -> None:
        by_pid = {m.pid: m for m in self._mains.values()}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            main = by_pid.get(found.si_pid)
            if main is not None and main.process is not None:
                main.code, main.exited = main.process.poll(), True
                continue
            _, status = os.waitpid(found.si_pid, os.WNOHANG)
            if main is not None:
                # What a zygote forked is our child, although we did not fork it: its parent was orphaned below us.
                main.code, main.exited = os.waitstatus_to_exitcode(status), True

    # ------------------------------------------------------------------ after a supervisor's own death

    def _adopt(self) -> None:
        known: dict[str, dict[str, Any]] = {}
        for entry in self._journal.entries:
            if "gone" in entry:
                known.pop(entry["gone"], None)
            else:
                known[entry["instance"]] = entry
        boot = self._procfs.boot_id()
        kept = []
        for instance, entry in known.items():
            if entry["boot"] != boot:
                continue
            pid, start_time = entry["pid"], entry["start_time"]
            if self._procfs.alive(pid, start_time):
                with contextlib.suppress(ProcessLookupError):
                    main = Main(instance, pid, start_time, None, os.pidfd_open(pid))
                    self._mains[instance] = main
                    kept.append(entry)
                    _log.info("process.adopted", instance=instance, pid=pid)
                    continue
            # The main died while nobody watched; its number stays taken as long as its session lives,
            # so whoever is in that session and carries no other mark is its child.
            for stat in self._procfs.processes():
                marks = self._procfs.environ(stat.pid)
                if stat.session == pid and stat.pid != pid and marks.get(OWNER, self.owner) == self.owner:
                    _kill(stat.pid)
        self._journal.rewrite(kept)
        for stat, marks in self._procfs.marked(self.owner):
            if marks[INSTANCE] not in self._mains:
                _log.warning("process.stray", instance=marks[INSTANCE], pid=stat.pid, name=stat.name)
                _kill(stat.pid)


def set_aside(log: Path) -> None:
    """Begins a new file where an engine's log grew too large; the earlier one stays as `<name>.1`."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_LIMIT:
            log.rename(log.with_suffix(log.suffix + ".1"))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
