"""What the REST API shows: the records without their secrets, and pages of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from relight.controller.autoscale.driver import Entry
from relight.controller.specs import Count, Rungs
from relight.core.fingerprint import Fingerprint
from relight.core.records import (
    CacheReport,
    Demand,
    Desired,
    DeviceHolder,
    Failure,
    HostReport,
    HostState,
    InstanceView,
    MemoryReading,
    Mode,
    ModelSpec,
    PrefetchReport,
    SlotView,
)
from relight.core.states import State

T = TypeVar("T")
R = TypeVar("R")

Limit = Annotated[int, Query(ge=1, le=500, description="How many items at most")]
Cursor = Annotated[
    str,
    Query(
        alias="continue",
        max_length=512,
        pattern=r"^([0-9a-f]{2})*$",
        description="`continue` of the page before this one",
    ),
]


class Page(BaseModel, Generic[T]):
    """Some items, and the cursor of the next page; it is empty on the last one."""

    model_config = ConfigDict(populate_by_name=True)

    items: list[T]
    next: str = Field(alias="continue", default="")


def paginate(records: Sequence[tuple[str, R]], limit: int, cursor: str, show: Callable[[R], Any]) -> dict[str, Any]:
    """The page after `cursor` of records sorted by their key; any place between two keys is one."""
    after = bytes.fromhex(cursor).decode(errors="replace")
    start = next((n for n, (key, _) in enumerate(records) if key > after), len(records)) if cursor else 0
    found = records[start : start + limit]
    more = start + limit < len(records)
    last = found[-1][0].encode().hex() if more else ""
    return {"items": [show(record) for _, record in found], "continue": last}


class ScaleBody(BaseModel):
    """How many replicas there shall be, and by which rungs the missing ones may wake."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: Count
    rungs: Rungs | None = None


class ModelOut(BaseModel):
    """A model: what its owner wrote, and how it stands."""

    spec: ModelSpec
    revision: int
    changed_at: float
    ready: int
    coming: int
    dormant: int
    demand: Demand | None
    warnings: list[str] | None
    """What the doctor would change: dangers and warnings of the specification where it would run. Not told in lists."""


class AutoscalerOut(BaseModel):
    """Whether the built-in autoscaler writes a model's number, and its last decisions, the newest first."""

    enabled: bool
    decisions: list[Entry]


class MemberOut(BaseModel):
    """One member of an instance."""

    slot: str
    rank: int
    devices: list[str]
    state: State
    incarnation: int
    pid: int
    endpoint: str
    progress: str
    memory: MemoryReading | None


class InstanceOut(BaseModel):
    """An instance: what it shall be and what it is."""

    id: str
    model: str
    desired: Desired
    state: State
    mode: Mode
    level: int
    operation: str
    since: float
    cause: str
    in_flight: int
    failure: Failure | None
    fingerprint: Fingerprint | None
    members: list[MemberOut]


class CacheNodeOut(BaseModel):
    """A slot's cache node. `signer` is the public key that other fleets put on their list for what was sealed here."""

    address: str
    signer: str
    bundles: int
    bytes: int
    quota: int
    quarantined: int
    hits: int
    misses: int
    compiles: int


class HostCopyOut(BaseModel):
    """A copy of weights in a slot's host memory: no replica, but a source of starts and wakes."""

    id: str
    model: str
    revision: str
    state: HostState
    reason: str
    bytes: int
    transports: list[str]


class HostTierOut(BaseModel):
    """A slot's part of the host tier."""

    budget_bytes: int
    bytes: int
    copies: list[HostCopyOut]
    prefetches: list[PrefetchReport]


class SlotOut(BaseModel):
    """A slot: a named set of devices with one agent."""

    name: str
    alive: bool
    host: str
    boot_id: str
    agent: str
    agent_address: str
    force_tcp: bool
    transports: dict[str, str]
    engines: dict[str, str]
    devices: int
    assigned_revision: int
    acknowledged_revision: int
    cache: CacheNodeOut | None
    host_tier: HostTierOut | None


class DeviceOut(BaseModel):
    """A device as measured."""

    slot: str
    id: str
    kind: str
    parent: str
    model_name: str
    total_bytes: int
    used_bytes: int
    healthy: bool
    reason: str
    instance: str
    holders: list[DeviceHolder]


def show_instance(view: InstanceView) -> InstanceOut:
    """Without grant keys: what is readable where is nobody's business but the receivers'."""
    reports = [m.report for m in view.members if m.report is not None]
    first = reports[0] if reports else None
    return InstanceOut(
        id=view.instance,
        model=view.model,
        desired=view.desired,
        state=view.state,
        mode=view.mode,
        level=view.level,
        operation=view.operation,
        since=max((r.since for r in reports), default=0.0),
        cause=first.cause if first else "not reported yet",
        in_flight=view.in_flight,
        failure=view.failure,
        fingerprint=first.fingerprint if first else None,
        members=[
            MemberOut(
                slot=m.slot,
                rank=m.rank,
                devices=list(m.devices),
                state=m.report.state if m.report else State.NONE,
                incarnation=m.report.incarnation if m.report else 0,
                pid=m.report.pid if m.report else 0,
                endpoint=m.report.endpoint.url if m.report and m.report.endpoint else "",
                progress=m.report.progress if m.report else "",
                memory=m.report.memory if m.report else None,
            )
            for m in view.members
        ],
    )


def show_cache(report: CacheReport | None) -> CacheNodeOut | None:
    """Without the key that grants are signed with."""
    if report is None:
        return None
    return CacheNodeOut(**{name: getattr(report, name) for name in CacheNodeOut.model_fields})


def show_host_tier(report: HostReport | None) -> HostTierOut | None:
    """Without the keys that grants are signed with, and without addresses."""
    if report is None:
        return None
    copies = [
        HostCopyOut(
            id=c.copy,
            model=c.content.model,
            revision=c.content.revision,
            state=c.state,
            reason=c.reason,
            bytes=c.bytes,
            transports=sorted(c.source.addresses) if c.source else [],
        )
        for c in report.copies
    ]
    return HostTierOut(
        budget_bytes=report.budget_bytes,
        bytes=sum(c.bytes for c in copies),
        copies=copies,
        prefetches=list(report.prefetches),
    )


def show_devices(slot: SlotView, instances: Sequence[InstanceView]) -> list[DeviceOut]:
    """The devices of one slot, each with the instance that claims it."""
    owner = {
        device: instance.instance
        for instance in instances
        for member in instance.members
        if member.slot == slot.slot
        for device in member.devices
    }
    return [
        DeviceOut(
            slot=slot.slot,
            id=d.id,
            kind=d.kind,
            parent=d.parent,
            model_name=d.model_name,
            total_bytes=d.total_bytes,
            used_bytes=d.used_bytes,
            healthy=d.healthy,
            reason=d.reason,
            instance=owner.get(d.id, ""),
            holders=list(d.holders),
        )
        for d in slot.devices
    ]
