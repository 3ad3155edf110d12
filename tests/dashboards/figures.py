"""What tests counted on their way, for the last line of `make test-dashboards`."""

from __future__ import annotations

from typing import Any

FIGURES: dict[str, Any] = {
    "panels": 0, "panels_without_data": None, "device_only_panels": 0, "queries": 0,
    "alerts": 0, "alerts_untested": None,
}  # fmt: skip
