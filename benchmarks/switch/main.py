"""`make bench-switch`: two real vLLM models taking turns on one device, each with a running replica elsewhere.

Three ways to give the device to the other model, interleaved in one run, each to the first correct token at the client
and with the time that it takes to drain and free the device: Relight's guardians (level 2, refilled from the running
replica and proven), the same engines at level 1 (weights from their own host copies), and ending `vllm serve` to start
the other one with its caches warm. What each figure means stands in docs/figures.md. The last line is one JSON object;
the exit status is 1 when an answer was wrong, a request failed, or a guardian at level 2 kept a host copy.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from machine import PORTS, RELIGHT, stand_apart
from plain import ARGUMENTS, TOKENS, Model, Served, completed, restart, serve

import engine

BEGUN = time.monotonic()
ROUNDS = 6
TINY = engine.ROOT / ".cache" / "tiny-qwen3"
MODELS = (Model("smollm2", engine.MODEL), Model("tiny", TINY))
NODES = {"a": 0, "b": 1, "c": 1}
"""Each with a device of one core: two for the replicas, and one that the guardians of both share."""
WAYS = ("switch", "level1", "restart")
DEADLINE = 180.0


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:6.0f} s] {text}", flush=True)


@dataclass
class Turns:
    """Relight with both models: a replica of each at home, and a guardian of each on the shared device."""

    directory: Path
    right: dict[str, tuple[str, str]]
    """By model: its first token, and its answer of TOKENS."""
    failed: int = 0
    host_copy_bytes: int = 0
    rungs: dict[str, set[str]] = field(default_factory=lambda: {"switch": set(), "level1": set()})

    def up(self) -> None:
        self.env = {**os.environ, "RELIGHT_STATE": str(self.directory / "state")}
        # Guardians come later: then each replica has a device, and the one that is left is where both may sleep.
        alone = {"guardians": {"replicas": 0}}
        config = {
            "ports": PORTS,
            "engines": {"vllm": {"python": str(engine.PYTHON)}},
            "nodes": [
                {"name": name, "devices": [{"id": f"cpu-{name}", "cores": [core], "memory": "6GiB"}]}
                for name, core in NODES.items()
            ],
            "models": [{"name": model.name, **self._spec(model, 1, 2), **alone} for model in MODELS],
        }
        path = self.directory / "machine.yaml"
        path.write_text(json.dumps(config, indent=2))
        subprocess.run([*RELIGHT, "up", "-f", str(path), "--timeout", "1500"], env=self.env, check=True, timeout=1600)
        said = json.loads((self.directory / "state" / "connection.json").read_text())
        self.gateway, self.headers = said["gateway"], {"authorization": f"Bearer {said['token']}"}
        self.api = httpx.Client(base_url=said["url"], headers=self.headers, timeout=90.0, trust_env=False)
        homes = {i["members"][0]["slot"] for i in self._instances()}
        (self.shared,) = NODES.keys() - homes
        for model in MODELS:
            self._path(model, "", self._spec(model, 1, 2))
        self._settled(None)

    def down(self) -> None:
        subprocess.run([*RELIGHT, "down"], env=self.env, check=False, timeout=180)

    @staticmethod
    def _spec(model: Model, replicas: int, level: int) -> dict[str, Any]:
        guardians = {"replicas": 1, "level": level, "max_per_device": len(MODELS)}
        return {
            "uri": str(model.path), "revision": "r1", "engine": "vllm", "args": list(ARGUMENTS), "replicas": replicas,
            "guardians": guardians,
        }  # fmt: skip

    def set_level(self, level: int) -> None:
        """The next sleep of each guardian keeps what `level` says; each is woken and put to sleep once for it."""
        for model in MODELS:
            self._path(model, "", self._spec(model, 1, level))
        self._settled(None)
        for model in MODELS:
            self.turn(model, None, "switch" if level == 2 else "level1", warm=True)
            self.sleep(model)

    def sleep(self, model: Model) -> None:
        """Takes the device from `model`; nobody has it afterwards."""
        self._idle()
        self._path(model, "/scale", {"replicas": 1})
        self._settled(None)

    def _idle(self) -> None:
        """Waits until no request is known to run: else the replica at home is the less busy one, and goes instead."""
        deadline = time.monotonic() + DEADLINE
        # No event tells of it: the model is asked again until its gateway has reported.
        while any((found["demand"] or {}).get("in_flight") for found in self._models()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {DEADLINE} s for requests to end")
            time.sleep(0.05)

    def _models(self) -> list[dict[str, Any]]:
        return list(self.api.get("/api/v1/namespaces/default/models").raise_for_status().json()["items"])

    def _path(self, model: Model, path: str, body: dict[str, Any]) -> None:
        self.api.put(f"/api/v1/namespaces/default/models/{model.name}{path}", json=body).raise_for_status()

    def _instances(self) -> list[dict[str, Any]]:
        found = self.api.get("/api/v1/instances").raise_for_status().json()["items"]
        return [i for i in found if i["state"] != "gone"]

    def _on_device(self) -> dict[str, dict[str, Any]]:
        return {i["model"].partition("/")[2]: i for i in self._instances() if i["members"][0]["slot"] == self.shared}

    def _settled(self, awake: Model | None) -> dict[str, dict[str, Any]]:
        """The engines on the shared device once exactly `awake` is ready there and the others sleep."""
        deadline = time.monotonic() + DEADLINE
        while True:
            found = self._on_device()
            wanted = {m.name: "ready" if m is awake else "dormant" for m in MODELS}
            if {name: i["state"] for name, i in found.items()} == wanted:
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {DEADLINE} s for {wanted}: {[(n, i['state']) for n, i in found.items()]}")
            time.sleep(0.05)

    def turn(self, to: Model, from_: Model | None, way: str, *, warm: bool = False) -> float:
        """Gives the device from `from_` to `to`; seconds until the first correct token of the new one."""
        rung = "peer_shm" if way == "switch" else "host_copy"
        self._idle()
        got: dict[str, Any] = {}
        ready = threading.Barrier(2)

        def ask() -> None:
            stand_apart()
            ready.wait()
            try:
                text, instance = completed(self.gateway, to.asked(), {**self.headers, "x-relight-pin": "next"})
                got.update(at=time.monotonic(), text=text, instance=instance)
            except httpx.HTTPError as error:
                got["error"] = str(error)

        thread = threading.Thread(target=ask)
        thread.start()
        ready.wait()
        begun = time.monotonic()
        if from_ is not None:
            self._path(from_, "/scale", {"replicas": 1})
        self._path(to, "/scale", {"replicas": 2} if warm else {"replicas": 2, "rungs": [rung]})
        thread.join(DEADLINE)
        found = self._settled(to)
        if "at" in got:
            pinned = {**self.headers, "x-relight-pin": found[to.name]["id"]}
            got["whole"], _ = completed(self.gateway, to.asked(TOKENS), pinned)
        told = (got.get("text"), got.get("whole"), got.get("instance"))
        if told != (*self.right[to.name], found[to.name]["id"]):
            self.failed += 1
            say(f"    WRONG: {to.name} by {way}: {got}, and not {self.right[to.name]}")
        if not warm:
            timeline = self.api.get(f"/api/v1/instances/{found[to.name]['id']}/timeline").raise_for_status().json()
            self.rungs[way] |= {r["kind"] for r in timeline["rungs"] if r["ok"]}
            if way == "switch":
                sleeper = next(i for name, i in found.items() if name != to.name)
                self.host_copy_bytes = max(self.host_copy_bytes, host_copy(sleeper["id"]))
        return float(got.get("at", time.monotonic())) - begun


def host_copy(instance: str) -> int:
    """Bytes of the host copy that an instance's processes hold: its memory file, by name."""
    total = 0
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"RELIGHT_INSTANCE={instance}".encode() not in (directory / "environ").read_bytes().split(b"\0"):
                continue
            for part in (directory / "smaps").read_text().split("/memfd:")[1:]:
                if part.partition("\n")[0].split()[0].endswith("-host"):
                    total += int(part.partition("\nRss:")[2].split()[0]) << 10
        except OSError:
            continue
    return total


def summary(seconds: dict[str, list[float]], turns: Turns) -> dict[str, Any]:
    middle = {way: statistics.median(found) for way, found in seconds.items()}
    return {
        "switch_seconds": round(middle["switch"], 3),
        "level1_seconds": round(middle["level1"], 3),
        "restart_seconds": round(middle["restart"], 2),
        "ratio": round(middle["restart"] / middle["switch"], 1),
        "over_level1": round(middle["switch"] / middle["level1"], 2),
        "host_copy_mib": round(turns.host_copy_bytes / 2**20, 1),
        "evictions": len(seconds["switch"]) + len(seconds["level1"]),
        "failed_requests": turns.failed,
        "worst": {way: round(max(found), 3) for way, found in seconds.items()},
        "rungs": {way: sorted(found) for way, found in turns.rungs.items()},
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }


def run(directory: Path) -> dict[str, Any]:
    say("plain vllm serve of each model, once: warm caches, and what a right answer is")
    right: dict[str, tuple[str, str]] = {}
    for model in MODELS:
        server = serve(model, directory / model.name)
        right[model.name] = server.answer(), server.answer(TOKENS)
        server.stop()
    turns = Turns(directory, right)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        say("relight up: a replica of each model at home, then a guardian of each on the shared device")
        turns.up()
        for way, level in (("switch", 2), ("level1", 1)):
            turns.set_level(level)
            seconds[way] = turn_about(turns, way)
        seconds["restart"] = restarts(directory, right)
    finally:
        turns.down()
    return summary(seconds, turns)


def turn_about(turns: Turns, way: str) -> list[float]:
    """The models by turns, starting from one of them awake on the device."""
    first, second = MODELS
    turns.turn(second, None, way, warm=True)
    found = []
    for n in range(ROUNDS):
        to, from_ = (first, second) if n % 2 == 0 else (second, first)
        found.append(turns.turn(to, from_, way))
        say(f"    {way:8} to {to.name:8} {found[-1]:7.3f} s")
    turns.sleep(MODELS[(ROUNDS - 1) % 2])
    return found


def restarts(directory: Path, right: dict[str, tuple[str, str]]) -> list[float]:
    """Ends the one server and starts the other, while Relight's engines idle."""
    first, second = MODELS
    running: Served = serve(second, directory / second.name)
    found = []
    for n in range(ROUNDS):
        to = first if n % 2 == 0 else second
        running, took, text = restart(running, to, directory / to.name)
        if text != right[to.name][0]:
            raise RuntimeError(f"plain {to.name} answers {text!r}, and {right[to.name][0]!r} before")
        found.append(took)
        say(f"    restart  to {to.name:8} {took:7.3f} s")
    running.stop()
    return found


def main() -> int:
    say(f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    if not (TINY / "model.safetensors").exists():
        script = engine.ROOT / "scripts" / "make_tiny_model.py"
        subprocess.run([str(engine.PYTHON), str(script), str(TINY)], check=True, timeout=120)
    with tempfile.TemporaryDirectory(prefix="rl-") as directory:
        found = run(Path(directory))
    print(f"{'way':10} {'median':>9} {'worst':>9}")
    for way, name in (("switch", "switch_seconds"), ("level1", "level1_seconds"), ("restart", "restart_seconds")):
        print(f"{way:10} {found[name]:8.3f}s {found['worst'][way]:8.3f}s")
    print(engine.dumps(found))
    return 0 if not found["failed_requests"] and not found["host_copy_mib"] else 1


if __name__ == "__main__":
    sys.exit(main())
