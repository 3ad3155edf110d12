"""Processes of the control plane: started, watched and ended by pid, each with a log of its own."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TAIL_LINES = 25
POLL_SECONDS = 0.05
PORTS = range(20_000, 32_000)
"""Below the range that outgoing connections are given ports of: a restarted server finds its own free again."""


class PlaneError(Exception):
    """The control plane did not do what was expected of it; the message says what, with the end of the log."""


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that nobody has at this moment, all different."""
    held: list[socket.socket] = []
    try:
        for port in random.sample(PORTS, len(PORTS)):
            candidate = socket.socket()
            try:
                candidate.bind((address, port))
            except OSError:
                candidate.close()
                continue
            held.append(candidate)
            if len(held) == count:
                return [int(s.getsockname()[1]) for s in held]
    finally:
        for taken in held:
            taken.close()
    raise PlaneError(f"expected {count} free ports from {PORTS.start} to {PORTS.stop}")


def wait_for(condition: Callable[[], bool], what: str, seconds: float, *, processes: Sequence[Process] = ()) -> None:
    """Returns when `condition` holds. Raises PlaneError when it does not in time, or one of `processes` ended."""
    until = time.monotonic() + seconds
    while not condition():
        for process in processes:
            if (status := process.ended()) is not None:
                raise PlaneError(f"expected {what}, but {process.name} ended with {status}:\n{process.tail()}")
        if time.monotonic() > until:
            logs = "".join(f"\n---- {process.name}\n{process.tail()}" for process in processes)
            raise PlaneError(f"expected {what} within {seconds:g} s{logs}")
        time.sleep(POLL_SECONDS)


class Process:
    """One server. It dies with the thread that started it, so that a killed test run leaves nothing behind."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        self._command = ["setpriv", "--pdeathsig", "KILL", *command]
        self._environment = environment
        self._running: subprocess.Popen[bytes] | None = None
        self._log_begins = 0

    @property
    def pid(self) -> int:
        """Of the running process."""
        if self._running is None:
            raise PlaneError(f"expected {self.name} to have been started")
        return self._running.pid

    def start(self, *, pass_fds: Sequence[int] = ()) -> None:
        """Starts it, with what it writes appended to the log."""
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            # In a session of its own: an interrupt from the keyboard must not end all of them at once.
            self._running = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                pass_fds=pass_fds, start_new_session=True,
            )  # fmt: skip

    def ended(self) -> int | None:
        """The exit status; None while it runs."""
        return None if self._running is None else self._running.poll()

    def said(self, text: str) -> bool:
        """Whether it wrote `text` since it was last started."""
        with self.log.open("rb") as log:
            log.seek(self._log_begins)
            return text.encode() in log.read()

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-TAIL_LINES:])

    def resident_bytes(self) -> int:
        """The memory it holds now; 0 when it does not run."""
        if self._running is None or self._running.poll() is not None:
            return 0
        for line in Path(f"/proc/{self._running.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        return 0

    def stop(self, seconds: float = 10.0) -> None:
        """Asks it to end, and ends it when it has not after `seconds`."""
        self._end(signal.SIGTERM, seconds)

    def kill(self) -> None:
        """Ends it without asking."""
        self._end(signal.SIGKILL, 0.0)

    def _end(self, by: signal.Signals, seconds: float) -> None:
        if self._running is None:
            return
        self._running.send_signal(by)
        try:
            self._running.wait(timeout=seconds or 10.0)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait(timeout=10.0)
