"""What readers share that fetch the bytes themselves (rdma, nixl): permissions over the socket, many reads in flight.

A card tells nobody here when a read is done, and a peer that is lost may lead to neither completion nor error: so reads
are looked at, each wait has a deadline of its own, and a connection that ends ends the reads.
"""

from __future__ import annotations

import select
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from relight.core.clock import Clock, SystemClock
from relight.core.errors import LocalFault, RemoteFault
from relight.transfer.segment import address_of
from relight.transfer.transports import wire
from relight.transfer.transports.base import Missing, Question

READ_STEP = 4 << 20
"""Bytes of one posted read: each costs the interpreter about the same, whatever its size."""
DEPTH = 16
"""Reads in flight on one connection."""
FIRST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between two looks at what is done: short reads are met at once, long ones leave the core alone."""


class Landed(NamedTuple):
    """Reads and their bytes that are in place since the last look, oldest first; `failed` says why the next one is
    not, "" when nothing is wrong."""

    reads: int
    bytes: int
    failed: str


@dataclass(slots=True)
class _Run:
    """One permitted read: how much of it was posted, is in place, and was handed on."""

    offset: int
    into: memoryview
    allowed: bool = False
    posted: int = 0
    placed: int = 0
    handed: int = 0


class FlightReader(wire.ControlReader, ABC):
    """A reader whose subclass posts reads and says which are in place. `deadline` bounds each wait, in seconds."""

    direct = True

    def __init__(self, sock: socket.socket, source: str, deadline: float, clock: Clock | None = None) -> None:
        super().__init__(sock, source)
        self._answers = select.poll()
        self._answers.register(self.sock, select.POLLIN | select.POLLRDHUP)
        self.completed = 0
        """Bytes that are said to have been read."""
        self._clock, self._deadline, self._aborted = clock or SystemClock(), deadline, False
        self._runs: deque[_Run] = deque()
        self._flying = 0
        self._never = threading.Event()

    @property
    @abstractmethod
    def by(self) -> str:
        """Through what it reads, for reasons."""

    @property
    @abstractmethod
    def most(self) -> int:
        """Bytes of the source's memory that may be read."""

    @abstractmethod
    def post(self, into: int, offset: int, length: int) -> None:
        """Starts a read of `length` bytes at `offset` of the source's memory into the address `into`.

        Raises LocalFault.
        """

    @abstractmethod
    def landed(self) -> Landed:
        """What is in place now, in the order in which it was posted."""

    def ask(self, question: Question, into: memoryview) -> None:
        if question.offset + question.length > self.most:
            raise RemoteFault(f"{self.source}: its memory ends before {question.offset + question.length}")
        self._send(wire.READ, question)
        self._runs.append(_Run(question.offset, into))

    def abort(self) -> None:
        self._aborted = True
        super().abort()

    def fill(self, count: int, instead: memoryview | None = None) -> None:
        run = self._runs[0]
        if not run.allowed:
            self._allow(run)
        pause, until = FIRST_PAUSE, self._clock.monotonic() + self._deadline
        while run.placed - run.handed < count:
            self._post()
            if self._reap():
                pause, until = FIRST_PAUSE, self._clock.monotonic() + self._deadline
                continue
            if self._aborted or self._clock.monotonic() > until:
                raise RemoteFault(f"{self.source}: stalled on {self.by}")
            if any(event & (select.POLLRDHUP | select.POLLHUP) for _, event in self._answers.poll(0)):
                self._say_why()
            self._never.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        run.handed += count
        if run.handed == len(run.into):
            self._runs.popleft()

    def _allow(self, run: _Run) -> None:
        try:
            self.status("refused a read")
        except BaseException:
            self._runs.popleft()
            raise
        run.allowed = True

    def _say_why(self) -> None:
        """The source ended the connection, and with it the pin: its reason may lie behind permissions that came."""
        while True:
            try:
                self.status("ended the connection")
            except Missing:
                continue

    def _post(self) -> None:
        """Keeps reads in flight: of the oldest run, and of later ones whose permission is there already."""
        for run in self._runs:
            run.allowed = run.allowed or self._allowed_already()
            if not run.allowed:
                return
            while run.posted < len(run.into) and self._flying < DEPTH:
                length = min(READ_STEP, len(run.into) - run.posted)
                place = address_of(run.into[run.posted : run.posted + length])
                try:
                    self.post(place, run.offset + run.posted, length)
                except LocalFault as error:
                    # A card refuses reads when its connection has broken, or it is gone itself: others may go on.
                    raise RemoteFault(f"{self.source}: {error}") from error
                run.posted += length
                self._flying += 1

    def _allowed_already(self) -> bool:
        """Takes a permission that has come; anything else is left until it is that read's turn."""
        try:
            # Asked first: a socket with a timeout waits that long even when told not to.
            if not self._answers.poll(0) or self.sock.recv(1, socket.MSG_PEEK) != wire.OK:
                return False
            return self.sock.recv(1) == wire.OK
        except OSError:
            return False

    def _reap(self) -> bool:
        """Counts what is in place now; whether there was anything. Raises RemoteFault when a read failed."""
        reads, done, failed = self.landed()
        self.completed += done
        self._flying -= reads
        for run in self._runs:
            part = min(done, run.posted - run.placed)
            run.placed += part
            done -= part
        if failed:
            raise RemoteFault(f"{self.source}: a read on {self.by} failed: {failed}")
        return done > 0
