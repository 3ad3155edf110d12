"""Timelines for tests of the flight recorder."""

from relight.controller.flight.timeline import Expectation, assemble
from relight.core.fingerprint import Fingerprint
from relight.core.records import Mode, Phase, Price, RungKind, RungResult, StartRecord

PRINT = Fingerprint(layout={"dtype": "bf16"}, content={"revision": "r1"}, runtime={"tokenizer": "t1"})
PRICES = (
    Price(Mode.GUARDIAN, 0.0, False, "no guardian of it stands by"),
    Price(Mode.LAZY, 4.0, True, "on a/d0; prior", {"fixed": 4.0}),
    Price(Mode.NORMAL, 5.0, True, "on a/d0; median of 2 measured", {"engine": 5.0}, True),
    Price(Mode.COLD, 60.0, True, "on a/d0; prior", {"fixed": 60.0}),
)


def start(number=0, mode=Mode.LAZY, phases=(("fork", 1.0), ("pull", 2.0), ("warm", 1.0)), **changes):
    """A start of four seconds that begins at 100 s and an hour later for each number."""
    at = begun = 100.0 + 3600.0 * number
    found = []
    for name, seconds in phases:
        found.append(Phase(name, at, at + seconds, ""))
        at += seconds
    rung = RungKind.PEER_SHM
    values = {
        "instance": f"i-{number}", "incarnation": 1, "model": "default/m", "mode": mode, "operation": f"op-{number}",
        "begun_at": begun, "ended_at": at, "ok": True, "reason": "started",
        "rungs": (RungResult(rung, True, "i-9 is ready", 2.0, "i-9", 2_000_000),) if mode is not Mode.COLD else (),
        "phases": tuple(found), "process": "forked from the zygote of vllm",
    }  # fmt: skip
    expected = changes.pop("expected", 4.0)
    fingerprint = changes.pop("fingerprint", PRINT)
    kind = changes.pop("device_kind", "cpu")
    record = StartRecord(**{**values, **changes})
    expectation = None
    if expected is not None:
        expectation = Expectation(
            record.instance, record.operation, mode, "lazy in 4.000 s, the fastest that fits", expected, begun, PRICES
        )
    return assemble(record, None, device_kind=kind, expectation=expectation, fingerprint=fingerprint)
