"""What tests measured and counted on their way, for the last line of `make test-kubernetes`."""

from __future__ import annotations

from collections import Counter
from typing import Any

FIGURES: dict[str, Any] = {}
COUNTS = Counter[str](requests_sent=0, requests_lost=0, stale_epoch_attempts=0, stale_epoch_effects=0)
