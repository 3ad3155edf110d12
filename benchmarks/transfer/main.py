"""`make bench-transfer`: Relight's verified transfer against what the system gives raw, and against other engines.

For a body of 1 GiB and for the demo's model: all contenders are started, then take turns, so that whatever else the
machine does meets all of them; medians of five rounds. Each contender's first delivery is compared byte by byte. The
last line is one JSON object; the exit status is 1 when a contender that must run did not. docs/transfer.md says how to
read it.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import body
from contender import WAYS

from relight.controller.cli import pki
from relight.core.clock import SystemClock

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
PEERS = ROOT / ".cache" / "peers"
HERE = Path(__file__).resolve().parent
BODIES = ("1gib", "model")
SAFER = ("relight_tls", "relight_sha256")
"""What is safer is measured with the smaller body alone: ten pairs with a GiB at each end take more than 24 GiB."""
CERTIFICATES = "RELIGHT_BENCH_CERTIFICATES"
ROUNDS = 5
DEADLINE = 120.0
"""Seconds that a contender has to start, and for each transfer."""
PATHS = {"shm": ("raw_shm", "relight_shm"), "tcp": ("raw_tcp", "relight_tcp")}
BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:5.0f} s] {text}", flush=True)


@cache
def certificates() -> Path:
    """A directory with an authority and one node's certificate, for the contender that needs them."""
    directory = Path(tempfile.mkdtemp(prefix="relight-bench-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    pki.make(directory, ("node",), SystemClock())
    return directory


@dataclass
class Runner:
    """One contender's processes, and what its transfers took."""

    name: str
    of: str
    process: subprocess.Popen[str] | None = None
    fault: str = ""
    told: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        """Sets `fault` when it cannot run here."""
        command = [str(PYTHON), str(HERE / "contender.py"), self.name, self.of]
        log = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(PEERS), CERTIFICATES: str(certificates())},
        )  # fmt: skip
        if "ready" not in self._line():
            self.fault = "it did not start"
            self.stop()

    def _line(self) -> dict[str, Any]:
        if self.process is None or self.process.stdout is None:
            return {}
        watch = threading.Timer(DEADLINE, self._kill)
        watch.start()
        try:
            while line := self.process.stdout.readline():
                # Engines print what they like on standard output.
                if line.startswith("{"):
                    return dict(json.loads(line))
            return {}
        finally:
            watch.cancel()

    def run(self) -> None:
        """One transfer."""
        if self.fault or self.process is None or self.process.stdin is None:
            return
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self._line()
        if told:
            self.told.append(told)
        else:
            self.fault = f"it ended in transfer {len(self.told) + 1}"
            self.stop()

    def stop(self) -> None:
        """Ends receiver and source."""
        if self.process is not None:
            self._kill()
            self.process.wait(30)
            self.process = None

    def _kill(self) -> None:
        # The source is in the receiver's group.
        with suppress(ProcessLookupError):
            if self.process is not None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def median(self, what: str) -> float | None:
        """Of five rounds; the first transfer, which was compared, is not among them."""
        values = [t[what] for t in self.told[1:] if what in t]
        return statistics.median(values) if values else None

    @property
    def seconds(self) -> float | None:
        """Of Relight's transfers the part that is timed for the others, the whole of it."""
        return self.median("refill_seconds") or self.median("seconds")


def measure(of: str, names: list[str]) -> dict[str, Runner]:
    """All contenders for one body, in turns."""
    runners = {name: Runner(name, of) for name in names}
    try:
        for runner in runners.values():
            runner.start()
        for n in range(ROUNDS + 1):
            for runner in runners.values():
                runner.run()
            say(f"    {of}: {'compared' if n == 0 else f'round {n} of {ROUNDS}'}")
    finally:
        for runner in runners.values():
            runner.stop()
    return runners


def table(found: dict[str, dict[str, Runner]]) -> None:
    print(f"{'contender':14} " + " ".join(f"{of:>24}" for of in found) + f" {'CPU s per GiB':>14}")
    for name in WAYS:
        cells = []
        for of in found:
            if (runner := found[of].get(name)) is None:
                cells.append("")
                continue
            length = body.offsets(body.sizes(of))[1]
            cells.append(
                f"{length / runner.seconds / 1e9:8.2f} GB/s {runner.seconds:7.4f} s" if runner.seconds else runner.fault
            )
        print(f"{name:14} " + " ".join(f"{c:>24}" for c in cells) + f" {cpu_per_gib(found, name) or '-':>14}")


def cpu_per_gib(found: dict[str, dict[str, Runner]], name: str) -> float | None:
    """Of both processes, from the 1 GiB body: its ticks are fine enough."""
    spent = found["1gib"][name].median("cpu_seconds") if name in found["1gib"] else None
    return None if spent is None else round(spent, 3)


def cost(runners: dict[str, Runner], name: str) -> float | None:
    """How many times longer the same body takes by a contender that is safer than plain tcp."""
    clear, secured = (runners[n].seconds if n in runners else None for n in ("relight_tcp", name))
    return round(secured / clear, 2) if clear and secured else None


def report(found: dict[str, dict[str, Runner]]) -> dict[str, Any]:
    """The JSON object of the last line."""
    ratios: dict[str, float | None] = {}
    leads: list[float] = []
    peers: dict[str, list[str]] = {path: [] for path in PATHS}
    for path, (raw, own) in PATHS.items():
        shares = []
        for runners in found.values():
            mine, base = runners[own].seconds, runners[raw].seconds
            if mine and base:
                shares.append(base / mine)
            others = {
                name: r.seconds for name, r in runners.items()
                if name.endswith(path) and name not in (raw, own) and r.seconds
            }  # fmt: skip
            peers[path] = sorted({*peers[path], *others})
            if mine and others:
                leads.append(min(s for s in others.values() if s) / mine)
        ratios[path] = round(min(shares), 3) if len(shares) == len(found) else None
    return {
        "shm_ratio": ratios["shm"],
        "tcp_ratio": ratios["tcp"],
        "min_lead": round(min(leads), 3) if leads else None,
        "cpu_seconds_per_gib": {path: cpu_per_gib(found, own) for path, (_, own) in PATHS.items()},
        "setup_ms": {
            path: round(1e3 * (found["1gib"][own].median("setup_seconds") or 0), 2) for path, (_, own) in PATHS.items()
        },
        "tls_over_tcp": cost(found["model"], "relight_tls"),
        "sha256_over_tcp": cost(found["model"], "relight_sha256"),
        "peers": peers,
        "machine": f"{len(os.sched_getaffinity(0))} cores",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    found = {}
    for of in BODIES:
        names = [name for name in WAYS if of == "model" or name not in SAFER]
        say(f"{of}: {', '.join(names)}")
        found[of] = measure(of, names)
    table(found)
    result = report(found)
    missing = [name for pair in PATHS.values() for name in pair if not all(f[name].seconds for f in found.values())]
    missing += [f"a peer for {path}" for path, others in result["peers"].items() if not others]
    if missing:
        print(f"bench-transfer: did not run: {', '.join(missing)}", file=sys.stderr)
    print(json.dumps(result))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
