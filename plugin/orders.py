"""What a member's residency is given and gives: the memory that it keeps, the order to fill it, what that brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relight.core.records import Deal, Phase, RungKind, SourceRef
from relight.plugin.pages import Pages
from relight.transfer.device_segment import AnySegment
from relight.transfer.manifest import TensorEntry, WeightManifest


@dataclass(frozen=True, slots=True)
class Order:
    """One rung to refill by, for one rank: which content, and from where.

    Peers are `sources`, the best one first, each with the address and manifest digest of the same rank; the disk and
    what came from storage have a `path`; the own host copy needs nothing.
    """

    kind: RungKind
    revision: str
    sources: tuple[SourceRef, ...] = ()
    path: str = ""
    share: bool = False
    """Whether pages of a copy on this host may be mapped instead of copied."""
    deal: Deal | None = None
    """What the sources' parts count in; None where nothing is dealt."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a refill brought: bytes, where its time went, and one line that says how; `brought` by whom, in bytes."""

    bytes: int
    phases: tuple[Phase, ...]
    detail: str
    brought: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What the engine-specific part gives: its memory, and how to describe, reload and restore its own tensors.

    `describe(revision)` hashes what the segment holds; `reload(path)` fills the segment from a checkpoint
    directory; `restore_scalars` sets host scalars; `rebuild_derived` makes from the weights what a forward needs of
    them. `unfit` says why this engine can neither sleep nor be read; empty when it can.
    """

    pages: Pages
    table: Mapping[str, TensorEntry]
    layout: Mapping[str, str]
    describe: Callable[[str], WeightManifest]
    reload: Callable[[str], None]
    restore_scalars: Callable[[Mapping[str, float]], None]
    rebuild_derived: Callable[[], None]
    unfit: str = ""

    @property
    def segment(self) -> AnySegment:
        """Where the weights lie."""
        return self.pages.segment
