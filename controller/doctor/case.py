"""What the doctor looks at: one model with how it would be started, or one slot. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from relight.controller.doctor.arguments import Arguments
from relight.controller.flight.timeline import Timeline
from relight.core.records import Mode, SlotView


class Severity(StrEnum):
    """How much it matters. A danger may cost answers or secrets, a warning memory or time, advice a little of it."""

    DANGER = "danger"
    WARNING = "warning"
    ADVICE = "advice"


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model's own part. What is not known is empty or None, and no rule says anything of it."""

    name: str
    engine: str
    uri: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    kind: str = ""
    """The kind of device."""
    devices: int = 1
    """Of one member, which is one host."""
    mode: Mode | None = None
    """By which it is started; None where Relight does not start it."""
    beside: int = 0
    """Engines that sleep on a device beside the one that is awake."""
    residual_bytes: int | None = None
    """What a sleep of it left behind, measured."""
    device_bytes: int | None = None
    listens: str | None = None
    """The address that its engine's HTTP listens on; empty for all of them; None: not known."""
    image: str = ""
    pull_policy: str = ""
    locked: str = ""
    """Why the slots that have its engine do not offer it: versions that do not match."""
    ring: bool | None = None
    """Whether starts use the compile-cache ring."""
    start: Timeline | None = None
    """Its last good start."""

    @property
    def arguments(self) -> Arguments:
        """The command line."""
        return Arguments(self.args)


@dataclass(frozen=True, slots=True)
class SlotCase:
    """A slot's own part."""

    slot: SlotView
    shared_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By device, the other slots of the host that have it too."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that could be better: what was seen, what it costs, what to do."""

    rule: str
    about: str
    """A model's key or a slot's name."""
    severity: Severity
    title: str
    evidence: str
    cost: str
    fix: str
