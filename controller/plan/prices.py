"""What a start by each way is expected to take, in parts. Zero I/O: core only.

A way is how an instance came up: a rung's name for the wake of a guardian, `lazy/RUNG` and `normal/RUNG` for
starts, `cold`. The expectation rests on the nearest that was measured: the same model and way; else the same
model and mode, with the bytes at the other rung's rate; else other models of the same way, with the bytes of
this one; else a prior. The basis is part of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from relight.core.records import Mode, RungKind

DEFAULT_WEIGHT_BYTES = 1 << 30
"""Assumed when neither a source nor the spec says how large the weights are."""
SLEEP = "sleep"
"""The way, and the phase, of an engine that falls asleep for the first time: the end of a guardian's start."""

# Seconds before and after the bytes, and bytes a second: deliberately on the slow side of one node's
# memory, ten-gigabit network and disk, because the first measurement replaces them.
_RUNGS: Mapping[str, tuple[float, float]] = {
    RungKind.PEER_SHM: (0.15, 4e9),
    RungKind.PEER_NVLINK: (0.2, 5e10),
    RungKind.PEER_NIXL: (0.2, 1e10),
    RungKind.PEER_RDMA: (0.2, 1e10),
    RungKind.PEER_TCP: (0.2, 1e9),
    RungKind.HOST_COPY: (0.15, 4e9),
    RungKind.HOST_SHM: (0.15, 4e9),
    RungKind.HOST_TCP: (0.2, 1e9),
    RungKind.STORAGE: (1.0, 0.1e9),
    RungKind.DISK: (0.5, 0.4e9),
    SLEEP: (0.5, 4e9),
}
_STARTS: Mapping[str, float] = {Mode.LAZY: 6.0, Mode.NORMAL: 12.0, Mode.COLD: 60.0}


def way_of(mode: Mode, rung: RungKind | None) -> str:
    """The way of a start by `mode` whose weights came by `rung`; None when no rung is known."""
    if mode is Mode.COLD:
        return str(mode)
    if mode in (Mode.LAZY, Mode.NORMAL):
        return f"{mode}/{rung}" if rung else str(mode)
    return str(rung or "unknown")


def split_way(way: str) -> tuple[str, str]:
    """(mode, rung) of a way; the rung is empty where none is known or the mode reads the disk by itself."""
    if way in _STARTS:
        return way, ""
    mode, _, rung = way.rpartition("/")
    return mode or str(Mode.GUARDIAN), rung


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected seconds from assignment to ready, its parts, and what it rests on."""

    seconds: float
    parts: Mapping[str, float]
    basis: str
    measured: bool = False
    """Whether it rests on starts of this very model."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of one model, way and device kind over `count` starts; medians that favour the newest."""

    seconds: float
    parts: Mapping[str, float]
    """By phase."""
    count: int
    fixed: float = 0.0
    """Seconds outside of the rung that brought the weights; all of them where no rung was recorded."""
    rate: float = 0.0
    """Bytes a second of that rung; 0 where no rung or no bytes were recorded."""
    apart: bool = False
    """Whether a rung was recorded, so that `fixed` is without the weights."""


def _prior(way: str) -> tuple[float, float]:
    mode, rung = split_way(way)
    if mode in _STARTS:
        return _STARTS[mode], _RUNGS.get(rung, _RUNGS[RungKind.DISK])[1]
    return _RUNGS.get(rung, _RUNGS[RungKind.DISK])


@dataclass(frozen=True, slots=True)
class Predictions:
    """Measured times by (model key, way, device kind)."""

    measured: Mapping[tuple[str, str, str], Measured] = field(default_factory=dict)

    def predict(self, model: str, way: str, device_kind: str, weight_bytes: int) -> Prediction:
        """The expected time of one start; `weight_bytes` of 0 or less means unknown."""
        known = self.measured.get((model, way, device_kind))
        if known is not None:
            return Prediction(known.seconds, known.parts, f"median of {known.count} measured", measured=True)
        size = weight_bytes if weight_bytes > 0 else DEFAULT_WEIGHT_BYTES
        prior_fixed, prior_rate = _prior(way)
        mode, rung = split_way(way)
        own, others = self._near(model, mode, way, device_kind)
        rates = self._measured_rates(rung, device_kind)
        rate = median(rates) if rates else prior_rate
        told = f"{size} bytes at {rate:.3g} bytes a second{' (measured)' if rates else ''}"
        if not own and not others:
            parts = {"fixed": prior_fixed, "weights": size / rate}
            return Prediction(sum(parts.values()), parts, f"prior: {prior_fixed:g} s and {told}")
        found = own or others
        parts = {"fixed": median(m.fixed for m in found)}
        # What no rung told apart has its weights in the fixed part already.
        if any(m.apart for m in found):
            parts["weights"] = size / rate
        count = sum(m.count for m in found)
        whose = f"{count} measured by other rungs" if own else f"{count} measured of other models"
        basis = f"fixed part of {whose}" + (f", and {told}" if "weights" in parts else "")
        return Prediction(sum(parts.values()), parts, basis, measured=bool(own))

    def rates(self) -> Mapping[str, float]:
        """Bytes a second that are counted on by each rung, whatever the kind of device."""
        found = {rung: self._measured_rates(rung, None) for rung in RungKind}
        return {rung: median(rates) if rates else _RUNGS[rung][1] for rung, rates in found.items()}

    def _measured_rates(self, rung: str, device_kind: str | None) -> list[float]:
        return [
            found.rate
            for (_, way, kind), found in self.measured.items()
            if device_kind in (None, kind) and found.rate > 0 and split_way(way)[1] == rung
        ]

    def _near(self, model: str, mode: str, way: str, device_kind: str) -> tuple[list[Measured], list[Measured]]:
        """What was measured of this model's starts by the same mode, and of other models by the same way."""
        own, others = [], []
        for (name, key, kind), found in sorted(self.measured.items()):
            if kind != device_kind:
                continue
            # A wake's fixed part is small and its rung is nearly all of it: another rung says nothing about it.
            if name == model and mode in _STARTS and split_way(key)[0] == mode:
                own.append(found)
            elif name != model and (key == way or (mode in _STARTS and split_way(key)[0] == mode)):
                others.append(found)
        return own, others
