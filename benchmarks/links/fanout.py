"""`make bench-fanout`: how long k receivers take that pass chunks on to each other, over shaped links.

Each node is a process in a network namespace of its own, whose one link carries the same rate both ways. Cases take
turns
in five rounds; medians count. The last line is one JSON object; the exit status is 1 when a receiver got wrong bytes or
none. docs/transfer.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from network import network, require
from nodes import DEADLINE, Process, goodput, say
from serving import latency_ratio

from relight.controller.plan.fanout import PARTS
from relight.transfer import grants
from relight.transfer.plan import HolderEnd, Link, Question, ReceiverEnd, TransferPlan, plan

MEGABITS = 500
BODY = 256 << 20
ROUNDS = 5
RECEIVERS = 8


@dataclass(frozen=True)
class Case:
    """How many sources, each with which share of a link (None: all of it), and how many receivers."""

    name: str
    sources: int
    share: float | None
    receivers: int


CASES = [Case(f"{k} from 1", 1, None, k) for k in (1, 2, 4, 8)] + [Case("8 from 2 capped", 2, 0.5, 8)]


class Bench:
    """The nodes, and what was measured with them."""

    def __init__(self, nodes: dict[str, Process], body: int, goodput: float) -> None:
        self._nodes, self._body, self._goodput = nodes, body, goodput

    def run(self, case: Case) -> float:
        """Seconds until the last receiver has the whole body, proven."""
        sources = [self._nodes[f"s{n}"] for n in range(case.sources)]
        receivers = [self._nodes[f"r{n}"] for n in range(case.receivers)]
        # Every node sends at most what its link carries, as the plan counts on: a queue that overflows helps nobody.
        share = self._goodput * (case.share or 1.0)
        for node in sources:
            node.tell(do="source", name=node.name, bind=node.address, bytes=self._body, pace=share)
        for node in receivers:
            node.tell(do="prepare", name=node.name, bind=node.address, bytes=self._body, pace=self._goodput)
        offers = {node.name: node.hear() for node in (*sources, *receivers)}
        made = self._plan(sources, receivers, case.share or 1.0)
        for n, node in enumerate(receivers):
            node.tell(
                do="receive", holders=self._holders(made, node.name, offers), planned=made.seconds, parts=PARTS,
                turn=n / len(receivers),
            )  # fmt: skip
        begun = time.perf_counter()
        found = [node.hear() for node in receivers]
        seconds = time.perf_counter() - begun
        lost = {k: v for f in found for k, v in f["lost"].items()}
        if lost:
            say(f"    {case.name}: {lost}")
        return seconds

    def _plan(self, sources: list[Process], receivers: list[Process], share: float) -> TransferPlan:
        # In parts, as the controller deals: receivers find the chunks of each by themselves.
        sizes = (self._body // PARTS,) * PARTS
        names = [n.name for n in (*sources, *receivers)]
        capacities = {f"{name}:{way}": self._goodput for name in names for way in ("up", "down")}
        capacities |= {f"share:{s.name}": self._goodput * share for s in sources}
        links = [
            Link(
                h, r.name, "tcp", self._goodput,
                (f"{h}:up", f"{r.name}:down") + ((f"share:{h}",) if h.startswith("s") else ()), "the only path",
            )
            for h in names for r in receivers if h != r.name
        ]  # fmt: skip
        return plan(
            Question(
                {0: sizes}, [HolderEnd(s.name, 0) for s in sources], [ReceiverEnd(r.name, 0, r.name) for r in
                receivers], links, capacities,
            )
        )  # fmt: skip

    def _holders(self, made: TransferPlan, receiver: str, offers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        queues = made.queues(receiver)
        # Every source can be fallen back to, whether the plan needs it or not.
        names = dict.fromkeys([*queues, *(n for n in offers if n.startswith("s"))])
        return [
            {
                "name": name, "address": offers[name]["address"], "queue": queues.get(name, ()),
                "partial": name.startswith("r"),
                "grant": grants.mint(
                    offers[name]["key"], grants.Claims(name, 1, "", receiver, time.time() + 2 * DEADLINE)
                ),
            }
            for name in names
        ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    require()
    names = [f"s{n}" for n in range(2)] + [f"r{n}" for n in range(RECEIVERS)]
    with ExitStack() as stack:
        spaces = stack.enter_context(network(names, MEGABITS))
        nodes = {name: Process(name, *spaces[name]) for name in names}
        for node in nodes.values():
            node.start()
            stack.callback(node.stop)
        rate = goodput(nodes["s0"], nodes["r0"], BODY // 2)
        say(f"links of {MEGABITS} Mbit/s each way; goodput of one idle link {rate / 1e6:.1f} MB/s")
        bench = Bench(nodes, BODY, rate)
        taken: dict[str, list[float]] = {case.name: [] for case in CASES}
        for n in range(rounds):
            for case in CASES:
                taken[case.name].append(bench.run(case))
            say(f"    round {n + 1} of {rounds}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in taken.items()))
        readers = [nodes[f"r{n}"] for n in range(RECEIVERS)]
        latency = latency_ratio(nodes["s1"], readers, rate / 2, rounds)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    floor = BODY / rate
    print(f"\n{'receivers':>18} {'seconds':>8} {'over the floor':>15}")
    for name, value in seconds.items():
        print(f"{name:>18} {value:8.2f} {value / floor:15.2f}")
    print(json.dumps({
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "ratio_8_over_1": round(seconds["8 from 1"] / seconds["1 from 1"], 3),
        "fraction_of_floor": round(floor / seconds["8 from 1"], 3),
        "capped_pair_over_single": round(seconds["8 from 2 capped"] / seconds["8 from 1"], 3),
        "source_itl_ratio": round(latency["ratio"], 3), "itl_p99_ms": round(latency["itl_p99_read"] * 1e3, 2),
        "read_from_serving_bytes": int(latency["read_bytes"]),
        "goodput_mb_per_second": round(rate / 1e6, 2), "body_bytes": BODY, "megabits": MEGABITS,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
