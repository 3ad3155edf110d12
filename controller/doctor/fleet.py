"""Cases out of a snapshot: each model as it would be started where it can run, each slot beside others. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from relight.controller.doctor.case import Finding, ModelCase, SlotCase
from relight.controller.doctor.judge import judge_model, judge_slot, worst_first
from relight.controller.flight.timeline import Timeline
from relight.controller.plan.fleet import closed_to
from relight.core.records import InstanceView, Mode, ModelSpec, SlotView, Snapshot

DEV_MODE: Mapping[str, Mapping[str, str]] = {"vllm": {"VLLM_SERVER_DEV_MODE": "1"}}
"""What Relight sets for each engine that opens control routes."""


def judge_fleet(snapshot: Snapshot, starts: Iterable[Timeline], specs: Iterable[ModelSpec]) -> tuple[Finding, ...]:
    """What could be better of these models and of every slot, the worst first."""
    known = list(starts)
    findings = [f for spec in specs for f in judge_model(model_case(spec, snapshot, known))]
    findings += [f for case in slot_cases(snapshot.slots) for f in judge_slot(case)]
    return worst_first(findings)


def model_case(spec: ModelSpec, snapshot: Snapshot, starts: Sequence[Timeline]) -> ModelCase:
    """A model as it would be started on the first slot that it can run on; nothing is said of slots where it cannot."""
    slots = [s for s in snapshot.slots if s.alive and not closed_to(spec, s) and spec.engine in s.engines]
    own = [i for i in snapshot.instances if i.model == spec.key and not i.remembered]
    slot = next(
        (s for s in slots if any(m.slot == s.slot for i in own for m in i.members)), slots[0] if slots else None
    )
    devices = slot.devices if slot else ()
    locked = [
        s.facts[f"refused/{spec.engine}"] for s in snapshot.slots if s.alive and f"refused/{spec.engine}" in s.facts
    ]
    newest = max((t for t in starts if t.model == spec.key and t.ok), key=lambda t: t.ended_at, default=None)
    return ModelCase(
        name=spec.key,
        engine=spec.engine,
        uri=spec.uri,
        args=spec.args,
        env={**DEV_MODE.get(spec.engine, {}), **spec.env},
        version=slot.engines[spec.engine] if slot else "",
        kind=devices[0].kind if devices else "",
        devices=spec.devices_per_member,
        mode=spec.mode,
        beside=spec.guardians.max_per_device - 1,
        residual_bytes=_residual(own),
        device_bytes=min((d.total_bytes for d in devices), default=None),
        listens=_listens(own),
        locked="" if slots or not locked else locked[0],
        ring=any(s.cache is not None for s in slots) if slots and spec.mode is not Mode.COLD else None,
        start=newest if newest is not None and newest.mode is not Mode.GUARDIAN else None,
    )


def slot_cases(slots: Iterable[SlotView]) -> list[SlotCase]:
    """Every slot that is alive, with the other slots of its host that have the same accelerators."""
    alive = [s for s in slots if s.alive]
    holders: dict[tuple[str, str], list[str]] = {}
    for slot in alive:
        for device in slot.devices:
            if device.kind != "cpu":
                holders.setdefault((slot.boot_id, device.id), []).append(slot.slot)
    return [
        SlotCase(
            slot,
            {
                d.id: others
                for d in slot.devices
                if (others := tuple(n for n in holders.get((slot.boot_id, d.id), ()) if n != slot.slot))
            },
        )
        for slot in alive
    ]


def _residual(own: Iterable[InstanceView]) -> int | None:
    """The most that a sleep left on one device."""
    left = [
        m.report.memory.residual_bytes // max(len(m.devices), 1)
        for i in own
        for m in i.members
        if m.report and m.report.memory and m.report.memory.residual_bytes
    ]
    return max(left, default=None)


def _listens(own: Iterable[InstanceView]) -> str | None:
    hosts = [
        urlsplit(m.report.endpoint.url).hostname or ""
        for i in own
        for m in i.members
        if m.report is not None and m.report.endpoint is not None
    ]
    return hosts[0] if hosts else None
