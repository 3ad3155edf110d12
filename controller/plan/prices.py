"""What a start by each mode and rung is expected to take, in parts. Zero I/O: core only.

A prediction is the median of what was measured for the same model, way and kind of device; until there is
one, a prior from bytes and bandwidth. The basis is part of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.core.records import RungKind

DEFAULT_WEIGHT_BYTES = 1 << 30
"""Assumed when neither a source nor the spec says how large the weights are."""

# Seconds before and after the bytes, and bytes a second: deliberately on the slow side of one node's
# memory, ten-gigabit network and disk, because the first measurement replaces them.
_PRIOR: Mapping[str, tuple[float, float]] = {
    RungKind.PEER_SHM: (0.15, 4e9),
    RungKind.PEER_RDMA: (0.2, 1e10),
    RungKind.PEER_TCP: (0.2, 1e9),
    RungKind.HOST_COPY: (0.15, 4e9),
    RungKind.DISK: (0.5, 0.4e9),
    "cold": (60.0, 0.4e9),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected seconds from assignment to ready, its parts, and what it rests on."""

    seconds: float
    parts: Mapping[str, float]
    basis: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen before: the median seconds over `count` starts, and the median of each phase."""

    seconds: float
    parts: Mapping[str, float]
    count: int


@dataclass(frozen=True, slots=True)
class Predictions:
    """Measured times by (model key, way, device kind); a way is a rung's name, or `cold`."""

    measured: Mapping[tuple[str, str, str], Measured] = field(default_factory=dict)

    def predict(self, model: str, way: str, device_kind: str, weight_bytes: int) -> Prediction:
        """The expected time of one start; `weight_bytes` of 0 or less means unknown."""
        known = self.measured.get((model, way, device_kind))
        if known is not None:
            return Prediction(known.seconds, known.parts, f"median of {known.count} measured")
        fixed, rate = _PRIOR[way]
        size = weight_bytes if weight_bytes > 0 else DEFAULT_WEIGHT_BYTES
        parts = {"fixed": fixed, "weights": size / rate}
        return Prediction(sum(parts.values()), parts, f"prior: {size} bytes at {rate:.3g} bytes a second")
