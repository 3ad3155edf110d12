"""What a device's memory is held for, by the measured holders and what their engines say of themselves. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from relight.core.records import DeviceReport, InstanceReport
from relight.core.states import State


class MemoryKind(StrEnum):
    """Together they are the whole device."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    RUNTIME = "runtime"
    """What engines that are awake hold besides: contexts, graphs, code."""
    GUARDIAN = "guardian"
    """All that sleepers hold."""
    ORPHAN = "orphan"
    """Held by processes of instances that do not run here: the device is not offered before it is free."""
    OTHER = "other"
    """In use by the device's own word, and by nobody that is known here: the driver, other software."""
    FREE = "free"


def by_kind(
    device: DeviceReport, instances: Iterable[InstanceReport], used_bytes: int | None = None
) -> Mapping[MemoryKind, int]:
    """Bytes of each kind. `used_bytes` is the device's own word; without it nothing is OTHER."""
    reports = {report.instance: report for report in instances}
    found = dict.fromkeys(MemoryKind, 0)
    for holder in device.holders:
        report = reports.get(holder.instance)
        if not holder.instance:
            found[MemoryKind.ORPHAN] += holder.bytes
        elif report is not None and report.state is State.DORMANT:
            found[MemoryKind.GUARDIAN] += holder.bytes
        else:
            weights, cache = _told(report)
            weights = min(weights, holder.bytes)
            cache = min(cache, holder.bytes - weights)
            found[MemoryKind.WEIGHTS] += weights
            found[MemoryKind.KV_CACHE] += cache
            found[MemoryKind.RUNTIME] += holder.bytes - weights - cache
    held = sum(found.values())
    found[MemoryKind.OTHER] = max(0, (used_bytes or 0) - held)
    found[MemoryKind.FREE] = max(0, device.total_bytes - held - found[MemoryKind.OTHER])
    return found


def _told(report: InstanceReport | None) -> tuple[int, int]:
    """Weights and KV cache on one of the engine's devices, in equal parts."""
    if report is None or report.memory is None or not report.devices:
        return 0, 0
    return report.memory.weight_bytes // len(report.devices), report.memory.kv_bytes // len(report.devices)
