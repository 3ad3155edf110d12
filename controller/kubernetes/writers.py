"""Who wrote a replica number, told by field managers, and whether they may. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from relight.controller.kubernetes.api import Object
from relight.controller.kubernetes.resources import Writer

REST_MANAGER, AUTOSCALER_MANAGER = "relight-rest", "relight-autoscaler"
HPA_MANAGER = "kube-controller-manager"
_MAY = {
    Writer.HPA: (HPA_MANAGER,),
    # KEDA writes to and from zero itself, and between them through an HPA of its own.
    Writer.KEDA: (HPA_MANAGER, "keda"),
    Writer.KUBECTL: ("kubectl", REST_MANAGER),
    Writer.AUTOSCALER: (AUTOSCALER_MANAGER,),
}


def last_writer(found: Object) -> str:
    """The field manager that `spec.replicas` belongs to; empty where the server does not say.

    Whoever made the object gave it the number to begin with, be it by the schema's default: that is no claim to it.
    """
    owners = [
        entry
        for entry in found["metadata"].get("managedFields") or []
        if "f:replicas" in _fields(entry).get("f:spec", {}) and not _at_creation(found, entry)
    ]
    # Several may have applied the same value: the newest one wrote it.
    newest = max(owners, key=lambda e: str(e.get("time") or ""), default=None)
    return str(newest.get("manager", "")) if newest else ""


def _at_creation(found: Object, entry: Object) -> bool:
    made, wrote = found["metadata"].get("creationTimestamp"), entry.get("time")
    if not made or not wrote:
        return False
    # Both are cut to the second, one a moment after the other.
    return (datetime.fromisoformat(wrote) - datetime.fromisoformat(made)).total_seconds() <= 1


def _fields(entry: Object) -> dict[str, Any]:
    found = entry.get("fieldsV1")
    return found if isinstance(found, dict) else {}


def conflict(writer: Writer, manager: str) -> str:
    """Why `manager` may not write a number that `writer` is declared for; empty when it may."""
    if writer is Writer.ANY or not manager:
        return ""
    allowed = _MAY[writer]
    if any(manager == name or manager.startswith(f"{name}-") for name in allowed):
        return ""
    return f"{manager} wrote spec.replicas, which spec.writer reserves for {writer.value} ({' or '.join(allowed)})"
