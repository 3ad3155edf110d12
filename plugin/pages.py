"""How a member's memory comes and goes, and the copy that a sleep at level 1 keeps of its weights.

On the CPU the weights lie in a segment of Relight's own (`HostPages`); on a device the engine's allocator has them
(plugin/vllm/allocator.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from relight.core.clock import Clock
from relight.transfer.device_segment import AnySegment
from relight.transfer.manifest import WeightManifest
from relight.transfer.segment import Segment, copy
from relight.transfer.source import Source


class Pages(Protocol):
    """Calls come one at a time, in the order of residency.py's states."""

    @property
    def segment(self) -> AnySegment:
        """Where the weights lie."""
        ...

    @property
    def copy(self) -> Source | None:
        """The host's copy, as a source within this process; None without one."""
        ...

    @property
    def copy_bytes(self) -> int:
        """Bytes of the host that the copy takes."""
        ...

    def keep(self, level: int, manifest: WeightManifest) -> None:
        """Before a release: copies what it would lose and nobody brings. Raises LocalFault, and nothing changed."""
        ...

    def release(self, level: int) -> None:
        """Gives back weights and what derives from them or from requests; level 1 has a copy. Raises LocalFault."""
        ...

    def bring_back(self) -> str:
        """Memory is there again, with whatever lies in it; what was done for it, empty where nothing is until it is
        filled. Repeating it does no harm. Raises LocalFault."""
        ...

    def give_back(self) -> None:
        """Releases again, from a refill that came to nothing; a copy stays. Raises LocalFault."""
        ...

    def awake(self) -> None:
        """The refill counts: what was kept for it goes."""
        ...


class HostPages:
    """Pages of this host. `drop_derived` gives back what was derived from weights or requests: the KV cache's pages,
    packed copies."""

    def __init__(self, instance: str, segment: Segment, drop_derived: Callable[[], None], clock: Clock) -> None:
        self.segment = segment
        self._instance, self._drop_derived, self._clock = instance, drop_derived, clock
        self._copy: Segment | None = None
        self.copy: Source | None = None

    @property
    def copy_bytes(self) -> int:
        return self._copy.resident_bytes() if self._copy is not None else 0

    def keep(self, level: int, manifest: WeightManifest) -> None:
        if level == 1:
            kept = Segment(f"{self._instance}-host", self.segment.bytes, digest=self.segment.digest)
            kept.populate(0, kept.bytes)
            copy(kept.view, self.segment.view)
            self._copy = kept
            self.copy = Source(f"{self._instance} host copy", kept, manifest, self._clock)

    def release(self, level: int) -> None:
        self.give_back()

    def bring_back(self) -> str:
        # Pages come while they are filled (transfer/session.py).
        return ""

    def give_back(self) -> None:
        self.segment.drop()
        self._drop_derived()

    def awake(self) -> None:
        if self.copy is not None and self._copy is not None:
            self.copy.close(0)
            self._copy.close()
            self.copy = self._copy = None
