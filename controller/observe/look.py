"""What one pass of the loop saw and did, for whoever measures. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.controller.flight.timeline import Expectation
from relight.core.records import Decision, Placement, Snapshot


@dataclass(frozen=True, slots=True)
class Look:
    """`placed` is what was written in this pass, `expected` what is expected of instances on their way, by their ids.

    `rates` are bytes a second that planning counts on, by rung. Slots and gateways are behind when they have not acted
    on the newest assignment or route table yet.
    """

    snapshot: Snapshot
    decisions: tuple[Decision, ...] = ()
    placed: tuple[Placement, ...] = ()
    expected: Mapping[str, Expectation] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    slots_behind: int = 0
    gateways: int = 0
    gateways_behind: int = 0
