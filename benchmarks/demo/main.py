"""`make demo`: a guardian becomes a proven replica, against plain vLLM's cold start, on this machine.

(a) plain `vllm serve`, cold, twice; (b) `relight up`; (c) steady requests while the model scales, then quiet wakes
by each rung; (d) a table and a timeline. The last line is one JSON object; the exit status is 1 when an answer was
wrong, lost or not proven. How each figure is defined stands in docs/figures.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import figures
from load import Load
from machine import Machine, Wake, gaps, show_timeline

import engine

BEGUN = time.monotonic()
LOADED = ("peer_shm", "peer_tcp")
SHORT = {"peer_shm": "shm", "peer_tcp": "tcp", "host_copy": "host_copy", "disk": "disk"}
ROUNDS = 6
PAUSE = 8.0
"""Seconds of steady requests between two scalings, so that at least 200 requests cross them."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:6.0f} s] {text}", flush=True)


def cold_starts(directory: Path) -> tuple[float, engine.Plain]:
    """The smaller of two cold starts, and the second server, still running."""
    say("(a) plain vllm serve, cold, twice: this compiles everything twice and takes minutes")
    engine.warm_page_cache()
    first = engine.start_cold(directory / "plain-1")
    say(f"    cold start 1: {first.cold_seconds:.1f} s to the first token")
    first.stop()
    second = engine.start_cold(directory / "plain-2")
    say(f"    cold start 2: {second.cold_seconds:.1f} s to the first token")
    return min(first.cold_seconds, second.cold_seconds), second


def compare(machine: Machine, plain: engine.Plain) -> dict[str, Any]:
    """Woken replica against source and against plain serving, each asked at its own port."""
    say("    comparing a woken replica with its source and with plain vllm")
    source = machine.one("ready")
    wake = machine.wake("peer_tcp", figures.unseen("compare"))
    urls = {i["id"]: i["members"][0]["endpoint"] for i in machine.instances()}
    woken, origin = urls[wake.instance], urls[source["id"]]
    share, ours, theirs = figures.decode_share(woken, plain.url)
    prompts = [figures.unseen(f"same {n}") for n in range(20)]
    of_woken = figures.tokens_of(woken, prompts)
    of_source = figures.tokens_of(origin, prompts)
    of_plain = figures.tokens_of(plain.url, prompts, logprobs=2)
    parted = figures.divergences(of_woken, of_plain)
    arms = engine.differences(engine.process_of(source["members"][0]["pid"]), engine.process_of(plain.process.pid))
    for name, why in arms.items():
        say(f"    differs between the arms: {name} ({why})")
    same = [c["token_ids"] for c in of_woken] == [c["token_ids"] for c in of_source]
    say(f"    tokens of woken replica and source are {'the same' if same else 'NOT the same'}")
    say(f"    decode: {statistics.median(ours):.2f} tokens/s woken, {statistics.median(theirs):.2f} plain")
    for each in parted:
        say(f"    {each}")
    back_to_one(machine)
    return {
        "engine_args": {"relight": engine.process_of(source["members"][0]["pid"])[0][1:], "plain": plain.argv[1:]},
        "same_engine_args": "NOT ALLOWED" not in arms.values(),
        "decode_share": round(share, 3),
        "same_tokens": same,
        "plain_divergences": len(parted),
    }


def released(machine: Machine) -> dict[str, Any]:
    """What a sleep gives back, measured from outside: proportional set size of the whole process tree."""
    machine.wake("peer_shm", figures.unseen("released"))
    # Either replica may be the one that sleeps next: both are measured awake.
    awake = {i["id"]: (machine.memory(i["id"]), i["members"][0]["memory"]) for i in machine.measured()}
    back_to_one(machine)
    sleeper = machine.one("dormant")["id"]
    ready, found = awake[sleeper]
    dormant = machine.memory(sleeper)
    promised = found["weight_bytes"] + found["kv_bytes"]
    return {
        "released_share": round((ready - dormant) / promised, 4),
        "residual_mib": round(dormant / 2**20, 1),
        "weight_mib": round(found["weight_bytes"] / 2**20, 1),
        "resident_kv_mib": round(found["kv_bytes"] / 2**20, 1),
        "level": 2,
    }


def back_to_one(machine: Machine) -> None:
    machine.ended(machine.scale(1))
    machine.settle(1)


def told(wake: Wake) -> str:
    """One wake in one line, with what its phases leave unnamed."""
    unnamed = gaps(wake)
    return f"{wake.rung:9} {wake.seconds:.3f} s, accounted {wake.accounted:.1%}" + (f" ({unnamed})" if unnamed else "")


def under_load(machine: Machine, load: Load) -> tuple[dict[str, list[Wake]], float]:
    """Six scalings by shm and six by tcp under steady requests; also first tokens under that load."""
    wakes: dict[str, list[Wake]] = {rung: [] for rung in LOADED}
    with load:
        floor = figures.first_token_seconds(machine.gateway, "loaded")
        for n in range(ROUNDS):
            for rung in LOADED:
                wake = machine.wake(rung, figures.unseen(f"loaded {rung} {n}"))
                wakes[rung].append(wake)
                say(f"    loaded {told(wake)}")
                time.sleep(PAUSE)
                back_to_one(machine)
                time.sleep(PAUSE)
    return wakes, floor


def through_zero(machine: Machine, load: Load) -> dict[str, Any]:
    """To zero, and woken from there by a request: the first of a new run of the same steady requests."""
    machine.ended(machine.scale(0))
    machine.settle(0)
    begun = time.perf_counter()
    with engine.first_token(machine.gateway, figures.unseen("from zero"), 4) as answer:
        seconds = time.perf_counter() - begun
        instance = answer.headers["x-relight-instance"]
    timeline = machine.timeline(instance, "first_token")
    rung = next(SHORT.get(r["kind"], r["kind"]) for r in timeline["rungs"] if r["ok"])
    say(f"    from zero: {seconds:.3f} s by {rung}: {timeline['rungs'][-1]['reason']}")
    back_to_one(machine)
    with load:
        time.sleep(PAUSE)
    return {"seconds": round(seconds, 4), "rung": rung}


def quiet(machine: Machine) -> dict[str, list[Wake]]:
    """Six wakes by each rung with nothing else going on."""
    wakes: dict[str, list[Wake]] = {}
    for rung in SHORT:
        level = 1 if rung == "host_copy" else 2
        machine.set_level(level)
        # A sleep follows the level that is written when it begins: one round trip puts the guardian there.
        machine.wake("peer_shm", figures.unseen(f"level {rung}"))
        back_to_one(machine)
        wakes[rung] = []
        for n in range(ROUNDS):
            wake = machine.wake(rung, figures.unseen(f"quiet {rung} {n}"))
            wakes[rung].append(wake)
            say(f"    quiet  {told(wake)}")
            back_to_one(machine)
    return wakes


def run(directory: Path, skip_cold: float | None) -> dict[str, Any]:
    cold, plain = cold_starts(directory) if skip_cold is None else (skip_cold, None)
    machine = Machine(directory)
    try:
        say("(b) relight up: one replica on node-a, one guardian on node-b")
        machine.up()
        if plain is None:
            plain = engine.start_cold(directory / "plain-2")
        compared = compare(machine, plain)
        plain.stop()
        freed = released(machine)
        say("(c) steady requests, one a second, while the model is scaled")
        load = Load(machine.gateway)
        loaded, first_loaded = under_load(machine, load)
        zero = through_zero(machine, load)
        say("    quiet wakes")
        copying = figures.copy_seconds(int(freed["weight_mib"] * 2**20))
        first_quiet = figures.first_token_seconds(machine.gateway, "quiet")
        calm = quiet(machine)
        say("(d) one wake as a timeline")
        show_timeline(machine, calm["disk"][-1].instance)
        return report(cold, compared, freed, loaded, calm, zero, (copying, first_loaded, first_quiet), load)
    except Exception:
        machine.explain()
        raise
    finally:
        if plain is not None:
            plain.stop()
        machine.down()


def report(
    cold: float,
    compared: dict[str, Any],
    freed: dict[str, Any],
    loaded: dict[str, list[Wake]],
    calm: dict[str, list[Wake]],
    zero: dict[str, Any],
    floors: tuple[float, float, float],
    load: Load,
) -> dict[str, Any]:
    """The JSON object of the last line."""
    copying, first_loaded, first_quiet = floors
    wakes = {
        short: {
            "level": 1 if short == "host_copy" else 2,
            "loaded": figures.spread([w.seconds for w in loaded.get(rung, [])]),
            "quiet": figures.spread([w.seconds for w in calm[rung]]),
        }
        for rung, short in SHORT.items()
    }
    floor = {"loaded": round(copying + first_loaded, 4), "quiet": round(copying + first_quiet, 4)}
    slower = {kind: max(wakes["shm"][kind]["median"], wakes["tcp"][kind]["median"]) for kind in ("loaded", "quiet")}
    every = [w for group in (loaded, calm) for each in group.values() for w in each]
    return {
        "cold_seconds": round(cold, 2),
        "ratio": round(cold / slower["loaded"], 1),
        "wakes": wakes,
        "floor_seconds": floor,
        "wake_over_floor": round(slower["quiet"] / floor["quiet"], 2),
        **compared,
        "requests_sent": load.sent,
        "failed_requests": len(load.failures),
        **freed,
        "accounted": round(min(w.accounted for w in every), 4),
        "from_zero": zero,
        "machine": f"{platform.processor() or platform.machine()}, 2 engines on {len(os.sched_getaffinity(0))} cores",
    }


def table(result: dict[str, Any]) -> None:
    """The figures for people."""
    say(f"cold start {result['cold_seconds']} s; the slower wake under load is {result['ratio']} times faster")
    print(f"{'rung':10} {'level':>5} {'loaded median':>14} {'worst':>8} {'quiet median':>13} {'worst':>8}")
    for rung, each in result["wakes"].items():
        cells = [each[k][v] for k in ("loaded", "quiet") for v in ("median", "worst")]
        shown = ["-" if c is None else f"{c:.3f} s" for c in cells]
        print(f"{rung:10} {each['level']:>5} {shown[0]:>14} {shown[1]:>8} {shown[2]:>13} {shown[3]:>8}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold-seconds", type=float, help="skip (a) and take this: for trying out (b) to (d)")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="relight-demo-"))
    try:
        result = run(directory, arguments.cold_seconds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    table(result)
    wrong = [
        name
        for name, good in {
            "same_engine_args": result["same_engine_args"],
            "same_tokens": result["same_tokens"],
            "plain_divergences": result["plain_divergences"] == 0,
            "failed_requests": result["failed_requests"] == 0,
        }.items()
        if not good
    ]
    if wrong:
        print(f"demo: wrong: {', '.join(wrong)}", file=sys.stderr)
    print(engine.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
