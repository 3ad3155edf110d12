"""A process that refills a segment that it was handed, for tests that kill it: `python receiver.py '{"fd": ..., ...}'`.

The segment is a memory file of the test's, so what arrived outlives this process. Prints one JSON line at the end.
RELIGHT_FAILPOINTS in its environment arms faults.
"""

from __future__ import annotations

import json
import sys

from tests.support.holder import LAYOUT, table

from relight.core.clock import SystemClock
from relight.transfer.request import Holder, Options, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.transports.tcp import TcpReader


def main() -> None:
    told = json.loads(sys.argv[1])
    segment = Segment("receiver", told["bytes"], descriptor=told["fd"])
    wanted = Wanted(LAYOUT, {t.name: t for t in table(told["bytes"])}, "r1")
    holder = Holder("a", lambda: TcpReader(told["address"], told["grant"], "a", 5.0))
    got = refill(
        segment, wanted, [holder], streams=1, clock=SystemClock(), options=Options(look_first=told["look_first"])
    )  # fmt: skip
    print(json.dumps({"bytes": got.bytes}), flush=True)


if __name__ == "__main__":
    main()
