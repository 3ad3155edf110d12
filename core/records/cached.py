"""What is asked of the compile-cache ring through an agent, and its answer. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """`operation` is list, show or release; the latter two need a `key` (a digest, or the beginning of one)."""

    operation: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class CacheBundle:
    """One key of the ring: its bundle and who holds it; or, without a bundle, why it is in quarantine."""

    key: str
    model: str = ""
    bundle: str = ""
    bytes: int = 0
    last_use: float = 0.0
    nodes: tuple[str, ...] = ()
    quarantine: str = ""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One key in full: every component of it, and what its bundle's manifest says."""

    key: str
    fields: Mapping[str, str] = field(default_factory=dict)
    bundle: str = ""
    bytes: int = 0
    files: int = 0
    signer: str = ""
    built_at: str = ""
    compile_seconds: float = 0.0
    last_use: float = 0.0
    nodes: tuple[str, ...] = ()
    quarantine: str = ""


@dataclass(frozen=True, slots=True)
class CacheAnswer:
    """`nodes` are those that did what was asked; `unheard` those that did not answer, with the reason."""

    bundles: tuple[CacheBundle, ...] = ()
    entry: CacheEntry | None = None
    nodes: tuple[str, ...] = ()
    unheard: Mapping[str, str] = field(default_factory=dict)
