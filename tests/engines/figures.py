"""What `make test-engines` counts, where the tests are that say so, and what of it has to hold.

A test says what it has seen by pytest's own fixture: `record_property("device_trees", "h100-sxm-8")`. It counts once
for each different value, when the test has passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTED = ("contracts_checked", "device_trees", "doctor_rules", "doctor_cases")
ENGINES = ("vllm", "vllm-kunlun", "sglang")
VERSIONS = "versions"
"""The property whose values are an engine and its release, as `vllm 0.32.0`: its source was read, or it ran."""
LEAST = {"contracts_checked": 40, "device_trees": 5, "doctor_rules": 15}
Seen = Mapping[str, set[str]]


def line(seen: Seen) -> dict[str, Any]:
    """The figures, in the order in which they are shown."""
    versions: dict[str, list[str]] = {}
    for one in sorted(seen.get(VERSIONS, ())):
        engine, _, release = one.partition(" ")
        versions.setdefault(engine, []).append(release)
    return {
        "engines": [e for e in ENGINES if e in versions],
        "versions": versions,
        **{name: len(seen.get(name, ())) for name in COUNTED},
    }


def short(seen: Seen) -> list[str]:
    """What there is too little of."""
    counts = {name: len(seen.get(name, ())) for name in LEAST}
    return [
        f"{name}: {counts[name]}, at least {least} are expected"
        for name, least in LEAST.items()
        if counts[name] < least
    ]
