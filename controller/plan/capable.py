"""What a slot's engines can do, as its agent learned it, and which ways are closed for want of that. Zero I/O: core
only.

What is known to be missing closes a way. What is unknown closes it only where nobody asked for it by name: then the
slower way is taken, which is safe. A slot that tells of no capabilities closes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from relight.core.records import Capability, Mode, ModelSpec, SlotView, Verdict


def of(slot: SlotView, engine: str, name: str, ranks: int) -> Capability | None:
    """What is known with so many devices, before what is known with any number; None where nothing is told."""
    told = [c for c in slot.capabilities if (c.engine, c.name) == (engine, name) and c.ranks in (0, ranks)]
    return max(told, key=lambda c: (c.ranks, c.at), default=None)


def closed_modes(spec: ModelSpec, slots: Mapping[str, SlotView], names: tuple[str, ...]) -> Mapping[Mode, str]:
    """Modes by which no replica of `spec` is started on the slots `names`, with the reason."""
    for name in names:
        found = of(slots[name], spec.engine, "lazy", spec.devices_per_member) if name in slots else None
        if found is None or found.verdict is Verdict.YES:
            continue
        if found.verdict is Verdict.NO or spec.mode is not Mode.LAZY:
            word = "cannot" if found.verdict is Verdict.NO else "is not known to"
            return {Mode.LAZY: f"{name} {word} start {spec.engine} lazily: {found.reason}"}
    return {}


def loads_itself(spec: ModelSpec, slots: Mapping[str, SlotView], names: Iterable[str]) -> str:
    """Why an engine that starts on the slots `names` takes its weights from no other process; empty when it does."""
    found = (of(slots[name], spec.engine, "await_weights", spec.devices_per_member) for name in names if name in slots)
    return next((known.reason for known in found if known is not None and known.verdict is Verdict.NO), "")


def no_sleep(spec: ModelSpec, slots: Mapping[str, SlotView]) -> Mapping[str, str]:
    """Slots on which no guardian of `spec` is made, with the reason: its engine cannot sleep there as asked."""
    found = {
        name: of(s, spec.engine, f"sleep_{spec.guardians.level}", spec.devices_per_member) for name, s in slots.items()
    }
    return {
        name: f"where {spec.engine} cannot sleep at level {spec.guardians.level} ({known.reason})"
        for name, known in found.items()
        if known is not None and known.verdict is Verdict.NO
    }
