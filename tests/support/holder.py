"""A process that holds weights and serves them, for tests that kill it: `python holder.py '{"name": ..., ...}'`.

Prints one JSON line {"address", "key"} and serves until it is killed. RELIGHT_FAILPOINTS arms faults.
"""

from __future__ import annotations

import json
import sys
import threading

from relight.core.clock import SystemClock
from relight.core.fingerprint import Fingerprint
from relight.transfer import grants
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.pace import Pace
from relight.transfer.segment import Segment
from relight.transfer.source import Source
from relight.transfer.transports.tcp import TcpListener
from relight.transfer.verify import blocks_of

LAYOUT = {"engine": "fault test"}
TENSOR = 1 << 20


def fill(segment: Segment, length: int) -> None:
    """Bytes that differ everywhere and are the same in every process."""
    for at in range(0, length, TENSOR):
        size = min(TENSOR, length - at)
        segment.view[at : at + size] = (at.to_bytes(8, "big") * (TENSOR // 8))[:size]


def table(length: int, view: memoryview | None = None) -> tuple[TensorEntry, ...]:
    """The tensors of a body of `length` bytes, with digests when there is a view of it."""
    found = []
    for at in range(0, length, TENSOR):
        size = min(TENSOR, length - at)
        blocks = b"" if view is None else blocks_of(view[at : at + size])
        found.append(TensorEntry(f"t{at // TENSOR}", "uint8", (size,), (1,), at, size, (), blocks))
    return tuple(found)


def main() -> None:
    told = json.loads(sys.argv[1])
    clock, length = SystemClock(), told["bytes"]
    segment = Segment(told["name"], length)
    segment.populate(0, segment.bytes)
    fill(segment, length)
    prints = Fingerprint(LAYOUT, {"revision": "r1"}, {})
    manifest = WeightManifest(prints, 0, segment.bytes, table(length, segment.view))
    pace = Pace(told["pace"], clock) if told.get("pace") else None
    source = Source(told["name"], segment, manifest, clock, pace)
    source.open(1, key := grants.new_key())
    print(json.dumps({"address": TcpListener("127.0.0.1").register(source), "key": key}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
