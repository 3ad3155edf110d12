"""What /proc says about processes: identity, parents, markers, memory. Standard library only.

A process is (pid, start time): a pid alone can be reused, the pair cannot within one boot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INSTANCE = "RELIGHT_INSTANCE"
"""Environment mark of every process of an instance: which instance it belongs to."""
OWNER = "RELIGHT_OWNER"
"""Environment mark: which supervisor answers for it (several may share one machine)."""
DEVICES = "RELIGHT_DEVICES"
"""Environment mark: the device ids, comma separated, whose memory the process may hold."""


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/<pid>/stat that identify a process and place it in a tree."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    start_time: int
    """Clock ticks after boot (field 22)."""

    @property
    def dead(self) -> bool:
        """A zombie holds nothing but its number."""
        return self.state in ("Z", "X")


class Procfs:
    """Reads a proc tree at `root`; processes that vanish while being read are simply absent."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root

    def boot_id(self) -> str:
        """The kernel's identifier of this boot: equal on two slots means the same host."""
        return (self._root / "sys/kernel/random/boot_id").read_text().strip()

    def stat(self, pid: int) -> Stat | None:
        """The process, or None when there is none (zombies are returned)."""
        try:
            text = (self._root / str(pid) / "stat").read_text(errors="replace")
        except (OSError, ValueError):
            return None
        # The name may itself contain spaces and parentheses: split at the last one.
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        if len(fields) < 20 or "(" not in head:
            return None
        return Stat(pid, head.partition("(")[2], fields[0], int(fields[1]), int(fields[3]), int(fields[19]))

    def alive(self, pid: int, start_time: int) -> bool:
        """Whether exactly this process still runs."""
        found = self.stat(pid)
        return found is not None and found.start_time == start_time and not found.dead

    def processes(self) -> list[Stat]:
        """Every living process, zombies left out."""
        found = []
        for entry in self._root.iterdir():
            if entry.name.isdigit():
                stat = self.stat(int(entry.name))
                if stat is not None and not stat.dead:
                    found.append(stat)
        return found

    def environ(self, pid: int) -> Mapping[str, str]:
        """The initial environment; empty when it may not be read or the process overwrote it."""
        try:
            data = (self._root / str(pid) / "environ").read_bytes()
        except OSError:
            return {}
        pairs = (item.partition("=") for item in data.decode(errors="replace").split("\0"))
        return {name: value for name, found, value in pairs if found}

    def openers(self, prefix: str) -> Mapping[str, frozenset[int]]:
        """By path that begins with `prefix`, the processes that have it open, as far as they may be looked at."""
        found: dict[str, set[int]] = {}
        for entry in self._root.iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                for descriptor in (entry / "fd").iterdir():
                    with suppress(OSError):
                        path = os.readlink(descriptor)
                        if path.startswith(prefix):
                            found.setdefault(path, set()).add(int(entry.name))
        return {path: frozenset(pids) for path, pids in found.items()}

    def core_ticks(self) -> Mapping[int, tuple[int, int]]:
        """Clock ticks since boot that each core was busy, and all of them; empty where the kernel does not tell."""
        try:
            lines = (self._root / "stat").read_text().splitlines()
        except OSError:
            return {}
        found = {}
        for line in lines:
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and len(fields) >= 8:
                # Time of guests, which follows, is part of the first two.
                ticks = [int(field) for field in fields[:8]]
                found[int(name[3:])] = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        return found

    def pss(self, pid: int) -> int:
        """Proportional set size in bytes; 0 when the process is gone."""
        return self._rollup(pid, "Pss:")

    def forked(self, pid: int) -> int:
        """Bytes of its own (not of files) that the process shares with those it was forked from or forked."""
        return self._rollup(pid, "Shared_Dirty:")

    def _rollup(self, pid: int, name: str) -> int:
        try:
            text = (self._root / str(pid) / "smaps_rollup").read_text()
        except OSError:
            return 0
        for line in text.splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        return 0

    def tree(self, instance: str, main_pid: int, owner: str) -> list[Stat]:
        """Every living process of an instance, its main process included.

        Three marks, because each can be lost: the environment (a process that renames itself may overwrite
        it), the ancestry (orphans are re-parented), the session (a child may call setsid).
        """
        everything = {s.pid: s for s in self.processes()}
        found = []
        for stat in everything.values():
            if stat.session == main_pid or self._descends(stat, main_pid, everything):
                found.append(stat)
                continue
            environ = self.environ(stat.pid)
            if environ.get(INSTANCE) == instance and environ.get(OWNER) == owner:
                found.append(stat)
        return found

    def marked(self, owner: str) -> list[tuple[Stat, Mapping[str, str]]]:
        """Every living process that carries the mark of `owner`, with its environment."""
        found = []
        for stat in self.processes():
            environ = self.environ(stat.pid)
            if environ.get(OWNER) == owner and INSTANCE in environ:
                found.append((stat, environ))
        return found

    @staticmethod
    def _descends(stat: Stat, ancestor: int, everything: Mapping[int, Stat]) -> bool:
        at: Stat | None = stat
        seen = 0
        while at is not None and seen < 256:
            if at.pid == ancestor:
                return True
            at = everything.get(at.parent)
            seen += 1
        return False
