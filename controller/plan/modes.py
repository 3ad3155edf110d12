"""What each mode would cost for one missing replica, and which of them is taken. Zero I/O: core only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from relight.controller.plan.prices import SLEEP, Predictions, way_of
from relight.controller.plan.sources import Ladder
from relight.core.records import DeviceReport, InstanceView, Mode, ModelSpec, Price, RungKind
from relight.core.states import State

ORDER = (Mode.GUARDIAN, Mode.LAZY, Mode.NORMAL, Mode.COLD)
"""From the fastest to the slowest, where nothing was measured."""
STARTS = ORDER[1:]

Chosen = Sequence[tuple[str, tuple[DeviceReport, ...]]]
"""A slot and its devices for each member of one instance."""


def choose(wanted: Mode, prices: Sequence[Price]) -> tuple[Price | None, str]:
    """The price that is taken, and why that one; None, and why none, when nothing fits.

    A named mode that does not fit gives way to the next slower one. `auto` goes through the order, and a
    slower mode overtakes only where both were measured or neither was: an untried mode is neither believed
    nor passed over because of a guess. It takes `cold` only where nothing else fits.
    """
    by_mode = {price.mode: price for price in prices}
    offered = [by_mode[mode] for mode in ORDER if mode in by_mode]
    if wanted is not Mode.AUTO:
        offered = [price for price in offered if ORDER.index(price.mode) >= ORDER.index(wanted)]
    closed = [f"{price.mode}: {price.reason}" for price in offered if not price.fits]
    fitting = [price for price in offered if price.fits]
    if not fitting:
        return None, "; ".join(closed)
    best = fitting[0]
    if wanted is not Mode.AUTO:
        if best.mode is wanted:
            return best, "as asked for"
        missed = [f"{price.mode}: {price.reason}" for price in offered[: offered.index(best)]]
        return best, f"{wanted} is asked for and does not fit ({'; '.join(missed)})"
    for price in fitting[1:]:
        if price.mode is not Mode.COLD and price.seconds < best.seconds and price.measured == best.measured:
            best = price
    if best.mode is Mode.COLD:
        return best, f"nothing else fits ({'; '.join(closed)})"
    return best, "the fastest that fits"


def ruled_out(failed: Iterable[InstanceView]) -> Mapping[Mode, str]:
    """The modes of starting that just failed, and those faster than them; none once the slowest failed too."""
    worst: InstanceView | None = None
    for view in failed:
        if view.mode in STARTS and (worst is None or STARTS.index(view.mode) > STARTS.index(worst.mode)):
            worst = view
    if worst is None or worst.mode is STARTS[-1]:
        return {}
    why = worst.failure.reason if worst.failure else "it ended although it was wanted"
    last = STARTS.index(worst.mode)
    return dict.fromkeys(STARTS[: last + 1], f"{worst.instance} failed by {worst.mode}: {why}")


def start_price(
    mode: Mode,
    spec: ModelSpec,
    chosen: Chosen,
    no_room: str,
    ladder: Ladder,
    predictions: Predictions,
    out: Mapping[Mode, str],
) -> Price:
    """What a start by `mode` on the chosen devices would take; `ladder` is that of a fresh start there."""
    if not chosen:
        return Price(mode, 0.0, False, no_room)
    if mode in out:
        return Price(mode, 0.0, False, out[mode])
    first = None
    told = ""
    if mode is not Mode.COLD:
        if not ladder.rungs:
            return Price(mode, 0.0, False, "no rung is open: " + "; ".join(ladder.refused))
        first = ladder.rungs[0].kind
        told = f"; by {first}: {ladder.rungs[0].reason}"
    kind = chosen[0][1][0].kind if chosen[0][1] else ""
    size = ladder.weight_bytes or spec.memory_bytes
    expected = predictions.predict(spec.key, way_of(mode, first), kind, size)
    where = ", ".join(f"{name}/{'+'.join(d.id for d in found)}" for name, found in chosen)
    reason = f"on {where}{told}; {expected.basis}"
    return Price(mode, expected.seconds, True, reason, expected.parts, expected.measured)


def with_sleep(price: Price, spec: ModelSpec, device_kind: str, predictions: Predictions) -> Price:
    """A guardian's start: `price`, and falling asleep."""
    if not price.fits:
        return price
    after = predictions.predict(spec.key, SLEEP, device_kind, spec.memory_bytes).seconds
    parts = {**price.parts, SLEEP: after}
    return Price(price.mode, price.seconds + after, True, price.reason, parts, price.measured)


def wake_price(
    spec: ModelSpec, guardian: InstanceView, ladder: Ladder, device_kind: str, predictions: Predictions
) -> Price:
    """What the wake of this guardian would take; one that is still starting has that to do first."""
    if not ladder.rungs:
        return Price(Mode.GUARDIAN, 0.0, False, "no rung is open: " + "; ".join(ladder.refused))
    first = ladder.rungs[0]
    size = ladder.weight_bytes or spec.memory_bytes
    expected = predictions.predict(spec.key, first.kind, device_kind, size)
    parts, seconds, measured = dict(expected.parts), expected.seconds, expected.measured
    if guardian.state in (State.STARTING, State.NONE):
        mode = guardian.mode if guardian.mode in STARTS else Mode.NORMAL
        start = predictions.predict(spec.key, way_of(mode, RungKind.DISK), device_kind, size)
        parts["start"] = start.seconds
        seconds += start.seconds
        measured = start.measured
    reason = f"{guardian.instance} is {guardian.state}; by {first.kind}: {first.reason}; {expected.basis}"
    return Price(Mode.GUARDIAN, seconds, True, reason, parts, measured)
