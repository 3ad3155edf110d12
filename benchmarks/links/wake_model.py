"""`make bench-wake-model`: a wake's transfer time as a set-up and a rate, and what follows from it for larger bodies.

Real sessions, connection set-up included, over links of three rates and bodies of three sizes; medians of five. The
fit is
T = a + bytes / (e x rate), by least squares of the relative error; only a fit that holds may be extrapolated. The last
line is one JSON object. docs/transfer.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from network import network, require
from nodes import DEADLINE, Process, say

from relight.transfer import grants
from relight.transfer.plan import floor_seconds

MEGABITS = (200, 500, 1000)
BODIES = tuple(n << 20 for n in (64, 128, 256))
ROUNDS = 5
GBIT = 1e9 / 8
FLEETS = (("8 x 400 Gbit/s", 8 * 400 * GBIT), ("8 x 200 Gbit/s", 8 * 200 * GBIT), ("NVLink, 8 x 450 GB/s", 8 * 450e9))
"""Bytes per second of one node in one direction."""
LARGE = (348e9, 668e9)
RECEIVERS = (1, 2, 4, 8, 16, 32, 64)

Sample = tuple[float, float, float]
"""(bytes, bytes per second of the link, seconds)."""


def fit(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """(a in seconds, e, largest relative error) of T = a + bytes / (e x rate)."""
    # Least squares of 1 = a / T + (1 / e) x (bytes / rate) / T: linear in a and 1 / e.
    rows = [(1 / t, n / r / t) for n, r, t in samples]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ta, tb = sum(x[0] for x in rows), sum(x[1] for x in rows)
    determinant = aa * bb - ab * ab
    a, inverse = (ta * bb - tb * ab) / determinant, (aa * tb - ab * ta) / determinant
    return a, 1 / inverse, max(abs(a + n / r * inverse - t) / t for n, r, t in samples)


def measure(megabits: int, rounds: int) -> list[Sample]:
    found: list[Sample] = []
    with ExitStack() as stack:
        spaces = stack.enter_context(network(["s0", "r0"], megabits))
        for body in BODIES:
            source, receiver = (Process(name, *spaces[name]) for name in ("s0", "r0"))
            for node in (source, receiver):
                node.start()
                stack.callback(node.stop)
            offer = source.ask(do="source", name="s0", bind=source.address, bytes=body, pace=None)
            claims = grants.Claims("s0", 1, "", "r0", time.time() + 10 * DEADLINE)
            holder = {
                "name": "s0", "address": offer["address"], "grant": grants.mint(offer["key"], claims),
                "partial": False, "queue": (), "connections": 2,
            }  # fmt: skip
            times = []
            for _ in range(rounds):
                receiver.ask(do="prepare", name="r0", bind=receiver.address, bytes=body, pace=None)
                times.append(receiver.ask(do="receive", holders=[holder], planned=0.0)["seconds"])
            found.append((body, megabits * 1e6 / 8, statistics.median(times)))
            say(f"    {body >> 20} MiB at {megabits} Mbit/s: {found[-1][2]:.3f} s")
            for node in (source, receiver):
                node.stop()
    return found


def tables(a: float, e: float) -> None:
    """What the arithmetic and the fit say about bodies that cannot be moved here."""
    print("\nleast seconds by arithmetic (floor), and by the fit (one receiver):")
    print(f"{'body':>8} {'node':>22} {'fit':>8}  " + " ".join(f"{k:>6}" for k in RECEIVERS) + "  receivers")
    for body in LARGE:
        for name, rate in FLEETS:
            floors = [floor_seconds(body, k, [rate], rate, rate) for k in RECEIVERS]
            print(
                f"{body / 1e9:5.0f} GB {name:>22} {a + body / (e * rate):8.2f}  "
                + " ".join(f"{f:6.2f}" for f in floors)
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    require()
    samples = [s for megabits in MEGABITS for s in measure(megabits, rounds)]
    a, e, residual = fit(samples)
    tables(a, e)
    print(json.dumps({
        "a_seconds": round(a, 4), "e": round(e, 4), "residual": round(residual, 4),
        "samples": [[n, r * 8 / 1e6, round(t, 3)] for n, r, t in samples],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
