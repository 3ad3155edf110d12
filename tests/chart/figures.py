"""What tests counted on their way, for the last line of `make test-chart`."""

from __future__ import annotations

from collections import Counter

FIGURES: dict[str, float] = {}
COUNTS = Counter[str](
    combinations=0, requests_sent=0, requests_lost=0, resources_left_after_purge=0, bad_values_refused=0
)
