"""What is forgotten, so that the store stays bounded: ended operations, used keys, history."""

from __future__ import annotations

from relight.controller.state.base import Write
from relight.controller.state.catalog import Catalog, drop
from relight.core.records import OperationState

KEPT_OPERATIONS = 1000
KEPT_KEYS = 1000
KEY_LIFETIME_SECONDS = 24 * 3600.0
HISTORY = 10_000
"""Changes kept for watchers that resume; more than a busy fleet writes in ten minutes."""


def surplus(catalog: Catalog, now: float) -> list[Write]:
    """Deletions of what is too old or too much; running operations always stay."""
    over = sorted(
        (v.record.created_at, name)
        for name, v in catalog.operations.items()
        if v.record.state is not OperationState.RUNNING
    )
    writes = [drop("operations", name) for _, name in over[: max(0, len(over) - KEPT_OPERATIONS)]]
    keys = sorted((v.record.at, name) for name, v in catalog.idempotency.items())
    extra = max(0, len(keys) - KEPT_KEYS)
    writes += [
        drop("idempotency", name) for n, (at, name) in enumerate(keys) if n < extra or at + KEY_LIFETIME_SECONDS < now
    ]
    return writes
