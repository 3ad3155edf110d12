"""What a refill is asked for, what it may do besides, and what it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relight.core.records import Phase
from relight.transfer.board import Bitmap
from relight.transfer.breaker import Breaker
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.source import Source
from relight.transfer.transports.base import Connect


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the receiver is made for, and which content it asks for: layout fields, its own tensors by name,
    revision."""

    layout: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]
    revision: str


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has chunks, and how it is reached.

    A `partial` holder is itself receiving and has what it has proven so far; it never says first what is read. `queue`
    is what the plan deals to it, counted in `Options.parts`. One in `reserve` is not even connected before all others
    are lost: a slow path is never taken in silence. Several holders may be ways to one `peer`.
    """

    name: str
    connect: Connect
    partial: bool = False
    queue: tuple[int, ...] = ()
    connections: int = 1
    reserve: bool = False
    manifest_digest: str = ""
    """What its manifest has to be, tensor for tensor and scalar for scalar; empty: any that fits."""
    peer: str = ""
    """Whose memory it is, where that has other holders too; empty: its own name."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a refill is: bytes placed of `total`, after how many seconds, and how many of them by which holder."""

    bytes: int
    total: int
    seconds: float
    holders: Mapping[str, int]

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class Cancel:
    """Ends what listens to it, once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._done = False

    def on(self, call: Callable[[], None]) -> None:
        """`call` runs when it is set, or at once when it was."""
        with self._lock:
            if not self._done:
                self._calls.append(call)
                return
        call()

    def set(self) -> None:
        with self._lock:
            self._done, calls = True, self._calls
            self._calls = []
        for call in calls:
            call()


OnProgress = Callable[[Progress], None]
"""Called after each chunk, one call at a time, from any connection's thread."""


@dataclass(slots=True)
class Kept:
    """What of a content is in place already: carried from a refill that broke off to the next one.

    Whoever writes to or drops the segment in between clears it.
    """

    content: tuple[tuple[str, bytes], ...] = ()
    """Names and block digests of the tensors."""
    placed: Bitmap = field(default_factory=lambda: Bitmap(0))
    paged: bool = False

    def clear(self) -> None:
        self.content, self.placed, self.paged = (), Bitmap(0), False


@dataclass(frozen=True, slots=True)
class Options:
    """What a refill may do besides: all of it can be left out.

    `planned_seconds`: until then nobody takes chunks that the plan dealt to another. `parts`: how many parts of equal
    length the holders' queues cut the body into; 0: they count chunks. `turn` tells receivers apart that divide a body
    among them (see Board). `relay` serves what has arrived. `cancel` ends the refill. `breaker` remembers over refills
    which sources failed. `look_first` finds by their digests the chunks that the segment holds already, as that of a
    receiver that was killed does.
    """

    planned_seconds: float = 0.0
    parts: int = 0
    turn: float = 0.0
    relay: Source | None = None
    kept: Kept = field(default_factory=Kept)
    cancel: Cancel = field(default_factory=Cancel)
    breaker: Breaker | None = None
    look_first: bool = False
    on_progress: OnProgress = lambda progress: None


@dataclass(frozen=True, slots=True)
class Received:
    """A complete, proven refill; `holders` says how many bytes came by which holder, `lost` who failed and why."""

    manifest: WeightManifest
    bytes: int
    phases: tuple[Phase, ...]
    holders: Mapping[str, int]
    lost: Mapping[str, str]
