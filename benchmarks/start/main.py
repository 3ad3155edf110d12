"""`make bench-start`: five starts of a replica by each mode, against plain vLLM's own cold and warm starts.

Interleaved in one run, the same engine arguments in every arm, all to the first correct token at the client: through
the gateway for Relight's arms, straight from the server for the plain ones. What each figure means stands in
docs/figures.md. The last line is one JSON object; the exit status is 1 when an answer was wrong or an arm's arguments
differ.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import SPEC, Machine, Wake, gaps, show_timeline

import engine

BEGUN = time.monotonic()
ROUNDS = 5
WAYS = ("cold", "warm", "normal", "lazy", "guardian")
MODES = ("normal", "lazy", "guardian")
PROMPT = "The capital of France is"
REQUESTS = 20
SETTLED = 8.0
"""Seconds after a start in which it may still warm up, and its bundle's use be judged, before the next one."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:6.0f} s] {text}", flush=True)


class Plain:
    """The two plain arms: nothing cached, and its own caches of an earlier start."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = ""
        self.argv: dict[str, tuple[list[str], dict[str, str]]] = {}

    def once(self) -> None:
        """Fills the warm arm's caches, with one request with log-probabilities, and keeps the right answer."""
        engine.warm_page_cache()
        server = self._start("warm")
        engine.complete(server.url, PROMPT, 1, logprobs=1)
        self.token = engine.complete(server.url, PROMPT, 1)["text"]
        server.stop(keep=True)

    def _start(self, way: str) -> engine.Plain:
        directory = self.directory / way
        if way == "cold":
            return engine.start_cold(directory)
        # The plugin alone, without Relight's worker and loader: it lets vLLM load the artefact that it wrote itself.
        return engine.start(directory, VLLM_PLUGINS="relight")

    def seconds(self, way: str) -> float:
        """Process start to first token."""
        server = self._start(way)
        try:
            if engine.complete(server.url, PROMPT, 1)["text"] != self.token:
                raise RuntimeError(f"the {way} plain server answers otherwise than before")
            self.argv[way] = engine.process_of(server.process.pid)
            return server.cold_seconds
        finally:
            server.stop(keep=way == "warm")


class Starts:
    """Relight's arms: scale-outs from one replica to two, by the mode that is asked for."""

    def __init__(self, machine: Machine, token: str) -> None:
        self.machine, self.token = machine, token
        self.wakes: dict[str, list[Wake]] = {mode: [] for mode in MODES}
        self.argv: dict[str, tuple[list[str], dict[str, str]]] = {}
        self.compiled_after: list[int] = []
        self.shared = 0

    def start(self, mode: str) -> Wake:
        """One scale-out; the machine is as before afterwards."""
        guardians = {"replicas": 1 if mode == "guardian" else 0, "level": 2}
        self.machine.change(mode=mode, replicas=1, guardians=guardians, scale_to_zero={"keep": "guardian"})
        if mode == "guardian":
            self.machine.wait("a guardian", lambda found: sorted(i["state"] for i in found) == ["dormant", "ready"])
        wake = self.machine.scale_out(PROMPT)
        if wake.timeline["mode"] != mode:
            raise RuntimeError(f"asked for {mode}, came by {wake.timeline['mode']}: {wake.timeline['reason']}")
        self._ask(wake)
        # What happens to the cache's record and the warm-up after a start has no event that a client could wait for.
        time.sleep(SETTLED)
        wake = Wake(wake.rung, wake.begun, wake.seconds, wake.accounted, wake.instance, self._told(wake))
        self.wakes[mode].append(wake)
        self._look(mode, wake)
        self.machine.change(
            mode=mode, replicas=1, guardians={"replicas": 0, "level": 2}, scale_to_zero={"keep": "nothing"}
        )
        self.machine.wait("one replica alone", lambda found: [i["state"] for i in found] == ["ready"])
        return wake

    def _ask(self, wake: Wake) -> None:
        """Twenty requests, one with log-probabilities, at the new replica itself; the first has to be right."""
        url = self._replica(wake)["members"][0]["endpoint"]
        for n in range(REQUESTS):
            more = {"logprobs": 1} if n == 1 else {}
            text = engine.complete(url, PROMPT, 1, **more)["text"]
            if text != self.token:
                raise RuntimeError(f"{wake.instance} answers {text!r}, plain vllm {self.token!r}")

    def _told(self, wake: Wake) -> dict[str, Any]:
        found: dict[str, Any] = (
            self.machine.api.get(f"/api/v1/instances/{wake.instance}/timeline").raise_for_status().json()
        )
        return found

    def _replica(self, wake: Wake) -> dict[str, Any]:
        return next(i for i in self.machine.instances() if i["id"] == wake.instance)

    def _look(self, mode: str, wake: Wake) -> None:
        member = self._replica(wake)["members"][0]
        self.argv[mode] = engine.process_of(member["pid"])
        if mode != "guardian":
            root = Path(self.argv[mode][1]["VLLM_CACHE_ROOT"]).parent
            self.compiled_after.append(written_since(root, wake.begun + wake.seconds))
            self.shared = max(self.shared, *(forked_bytes(pid) for pid in zygotes()))


def written_since(root: Path, when: float) -> int:
    """Files below `root` that were written after the first token: what the requests after it compiled."""
    return sum(1 for p in root.rglob("*") if p.is_file() and p.stat().st_mtime > when and p.suffix in (".so", ".cpp"))


def zygotes() -> list[int]:
    """Zygotes of this user, by the mark in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if b"RELIGHT_INSTANCE=zygote-" in (directory / "environ").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def forked_bytes(pid: int) -> int:
    """Bytes of a zygote's own memory that it shares with what it forked."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(rollup.partition("\nShared_Dirty:")[2].split()[0]) << 10


def summary(seconds: dict[str, list[float]], starts: Starts, plain: Plain, first: dict[str, Any]) -> dict[str, Any]:
    middle = {way: statistics.median(found) for way, found in seconds.items()}
    differences = {
        way: engine.differences(argv, plain.argv["cold"]) for way, argv in {**plain.argv, **starts.argv}.items()
    }
    for way, found in differences.items():
        for name, why in found.items():
            say(f"    {way} differs from cold: {name} ({why})")
    errors = [
        abs(w.timeline["predicted_seconds"] - w.timeline["seconds"]) / w.timeline["seconds"]
        for wakes in starts.wakes.values()
        for w in wakes[3:]
        if w.timeline["predicted_seconds"] is not None
    ]
    return {
        "seconds": {way: {"median": round(middle[way], 3), "worst": round(max(seconds[way]), 3)} for way in WAYS},
        "cold_over_lazy": round(middle["cold"] / middle["lazy"], 1),
        "warm_over_lazy": round(middle["warm"] / middle["lazy"], 1),
        "cold_over_guardian": round(middle["cold"] / middle["guardian"], 1),
        "same_engine_args": all("NOT ALLOWED" not in found.values() for found in differences.values()),
        "accounted": round(min(w.accounted for wakes in starts.wakes.values() for w in wakes), 4),
        "zygote_shared_mib": round(starts.shared / 2**20, 1),
        "predicted_error": {"median": round(statistics.median(errors), 3), "worst": round(max(errors), 3)},
        "cache": cache(starts, first),
    }


def cache(starts: Starts, first: dict[str, Any]) -> dict[str, Any]:
    """Over the normal and lazy starts after the first of the fingerprint, which compiled."""
    found = [w.timeline.get("cache") or {} for mode in ("normal", "lazy") for w in starts.wakes[mode]]
    hits = [c for c in found if c.get("verdict") == "hit"]
    return {
        "scale_outs": len(found),
        "installed": sum(1 for c in found if c.get("bundle")),
        "selected": sum(int(c.get("selected") or 0) for c in found),
        "hit": len(hits),
        "hit_share": round(len(hits) / len(found), 3) if found else 0.0,
        "compiled": sum(int(c.get("compiled") or 0) for c in found) + sum(starts.compiled_after),
        "first_compiled": int((first.get("cache") or {}).get("compiled") or 0),
        "seconds_saved": round(sum(float(c.get("saved_seconds") or 0.0) for c in found), 1),
    }


def run(directory: Path, rounds: int) -> dict[str, Any]:
    plain = Plain(directory)
    say("plain vllm serve, once, so that its warm arm has caches; this compiles and takes minutes")
    plain.once()
    machine = Machine(directory, {**SPEC, "mode": "normal", "guardians": {"replicas": 0, "level": 2}})
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        say("relight up: one replica, which compiles for all that follow")
        machine.up()
        starts = Starts(machine, plain.token)
        first = machine.timeline(machine.one("ready")["id"], "first_token")
        for n in range(rounds):
            for way in WAYS:
                if way in MODES:
                    wake = starts.start(way)
                    seconds[way].append(wake.seconds)
                    told = f", {wake.rung}, accounted {wake.accounted:.1%} ({gaps(wake)}), {wake.timeline['process']}"
                else:
                    seconds[way].append(plain.seconds(way))
                    told = ""
                say(f"    round {n + 1}: {way:9} {seconds[way][-1]:7.2f} s{told}")
        for mode in MODES:
            show_timeline(machine, starts.wakes[mode][-1].instance)
        return summary(seconds, starts, plain, first)
    except BaseException:
        machine.explain()
        raise
    finally:
        machine.down()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="starts of each arm; figures are of five")
    rounds = parser.parse_args().rounds
    say(
        f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory(prefix="rl-") as directory:
        found = run(Path(directory), rounds)
    print(f"{'arm':10} {'median':>9} {'worst':>9}")
    for way, each in found["seconds"].items():
        print(f"{way:10} {each['median']:8.2f}s {each['worst']:8.2f}s")
    print(engine.dumps(found))
    return 0 if found["same_engine_args"] else 1


if __name__ == "__main__":
    sys.exit(main())
