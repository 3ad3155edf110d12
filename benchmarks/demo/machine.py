"""Relight itself in the demo: up, scale, wakes on the client's clock, memory from outside, down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine import ARGUMENTS, MODEL, NAME, PYTHON, ROOT, asked, streamed

RELIGHT = [str(ROOT / ".venv" / "bin" / "python"), "-m", "relight.controller.cli"]
PORTS = {"controller": 7410, "fleet": 7411, "gateway": 8410}
SPEC: dict[str, Any] = {
    "uri": str(MODEL), "revision": "smollm2-135m-instruct", "engine": "vllm", "args": list(ARGUMENTS), "replicas": 1,
    "guardians": {"replicas": 1, "level": 2}, "scale_to_zero": {"keep": "guardian"},
}  # fmt: skip
SETTLE_DEADLINE = 120.0


@dataclass(frozen=True)
class Wake:
    """One wake on the client's clock, in seconds, with the share of it that lies in named phases."""

    rung: str
    begun: float
    seconds: float
    accounted: float
    instance: str
    timeline: dict[str, Any]


class Machine:
    """Two nodes on this machine, brought up by the command line as a user would."""

    def __init__(self, directory: Path, spec: dict[str, Any] = SPEC) -> None:
        self.directory, self.spec = directory, spec
        self.env = {**os.environ, "RELIGHT_STATE": str(directory / "state")}

    def up(self) -> None:
        """`relight up` with one replica on one node and one guardian on the other."""
        config = {
            "ports": PORTS,
            "engines": {"vllm": {"python": str(PYTHON)}},
            "nodes": [
                {"name": "node-a", "devices": [{"id": "cpu0", "cores": [0], "memory": "6GiB"}]},
                {"name": "node-b", "devices": [{"id": "cpu1", "cores": [1], "memory": "6GiB"}]},
            ],
            "models": [{"name": NAME, **self.spec}],
        }
        path = self.directory / "machine.yaml"
        # JSON is YAML: nothing else has to be installed to write it.
        path.write_text(json.dumps(config, indent=2))
        subprocess.run([*RELIGHT, "up", "-f", str(path), "--timeout", "1500"], env=self.env, check=True, timeout=1600)
        said = json.loads((self.directory / "state" / "connection.json").read_text())
        self.gateway = said["gateway"]
        self.headers = {"authorization": f"Bearer {said['token']}"}
        self.api = httpx.Client(base_url=said["url"], headers=self.headers, timeout=90.0, trust_env=False)

    def explain(self) -> None:
        """What went wrong, before the directory goes: instances, and what the components warned of."""
        subprocess.run([*RELIGHT, "instances"], env=self.env, check=False, timeout=60)
        for path in sorted((self.directory / "state" / "logs").glob("*.log")):
            lines = [x for x in path.read_text(errors="replace").splitlines() if '"level": "info"' not in x]
            print(f"--- {path.name}\n" + "\n".join(lines[-20:]), flush=True)

    def down(self) -> None:
        subprocess.run([*RELIGHT, "down"], env=self.env, check=False, timeout=180)

    # ------------------------------------------------------------------ asking

    def instances(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.api.get("/api/v1/instances").raise_for_status().json()["items"]
        return items

    def one(self, state: str) -> dict[str, Any]:
        """The one instance in `state`."""
        return next(i for i in self.instances() if i["state"] == state)

    def wait(self, what: str, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The instances once `holds` is true of them."""
        deadline = time.monotonic() + SETTLE_DEADLINE
        while not holds(found := self.instances()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {SETTLE_DEADLINE} s for {what}: {[(i['id'], i['state']) for i in found]}")
            time.sleep(0.05)
        return found

    # ------------------------------------------------------------------ scaling

    def scaling(self, replicas: int, rung: str | None = None) -> httpx.Request:
        """A scale request, ready to be sent."""
        body: dict[str, Any] = {"replicas": replicas}
        if rung:
            body["rungs"] = [rung]
        return self.api.build_request("PUT", f"/api/v1/namespaces/default/models/{NAME}/scale", json=body)

    def scale(self, replicas: int) -> dict[str, Any]:
        """Sends the scale request; returns the operation as accepted."""
        operation: dict[str, Any] = self.api.send(self.scaling(replicas)).raise_for_status().json()
        return operation

    def ended(self, operation: dict[str, Any]) -> dict[str, Any]:
        """The operation as it ended. Raises unless it is done."""
        while operation["state"] == "running":
            path = f"/api/v1/operations/{operation['id']}"
            operation = self.api.get(path, params={"wait": 30}).raise_for_status().json()
        if operation["state"] != "done":
            raise RuntimeError(f"{operation['id']} {operation['state']}: {operation['reason']}")
        return operation

    def settle(self, ready: int) -> None:
        """Waits until `ready` replicas are ready and all others are dormant."""

        def settled(found: list[dict[str, Any]]) -> bool:
            states = sorted(i["state"] for i in found)
            return states.count("ready") == ready and states.count("dormant") == len(states) - ready

        self.wait(f"{ready} ready and the rest dormant", settled)

    def change(self, **changes: Any) -> None:
        """Writes the model's specification with these fields changed."""
        self.spec = {**self.spec, **changes}
        self.api.put(f"/api/v1/namespaces/default/models/{NAME}", json=self.spec).raise_for_status()

    def set_level(self, level: int) -> None:
        """Writes the guardians' level; the next sleep follows it."""
        self.change(replicas=1, guardians={"replicas": 1, "level": level})

    def wake(self, rung: str, prompt: str, replicas: int = 2) -> Wake:
        """A scale-out by one rung."""
        wake = self.scale_out(prompt, replicas, rung)
        if wake.rung != rung:
            raise RuntimeError(f"asked for {rung}, came by {wake.rung}: {wake.timeline['rungs']}")
        return wake

    def scale_out(self, prompt: str, replicas: int = 2, rung: str | None = None) -> Wake:
        """Scales up and, at once, sends a request pinned to the next replica to become ready; waits for its token."""
        got: dict[str, Any] = {}
        ready = threading.Barrier(2)
        # Both requests are built before the clock starts: it measures the way from being sent.
        pinned = asked(self.gateway, prompt, 4, {**self.headers, "x-relight-pin": "next"})
        scaling = self.scaling(replicas, rung)

        def ask() -> None:
            stand_apart()
            ready.wait()
            got["sent"] = time.time()
            with streamed(pinned) as answer:
                got["token"] = time.time()
                got["instance"] = answer.headers["x-relight-instance"]

        thread = threading.Thread(target=ask)
        thread.start()
        ready.wait()
        scaled = time.time()
        scaling.headers["x-request-start"] = f"t={scaled:.6f}"
        accepted = self.api.send(scaling).raise_for_status()
        # Until the token is there this thread stays out of the way of the one that waits for it.
        thread.join(SETTLE_DEADLINE)
        operation = self.ended(accepted.json())
        if "token" not in got:
            raise RuntimeError(f"the pinned request got no token; operation {operation}")
        begun = min(scaled, got["sent"])
        timeline = self.timeline(got["instance"], "first_token")
        took = next((str(r["kind"]) for r in timeline["rungs"] if r["ok"]), "")
        return Wake(
            took, begun, got["token"] - begun, covered(timeline, begun, got["token"]), got["instance"], timeline
        )

    def timeline(self, instance: str, phase: str) -> dict[str, Any]:
        """The newest start of an instance, once the gateway's phase is in it."""
        deadline = time.monotonic() + 10.0
        while True:
            found: dict[str, Any] = self.api.get(f"/api/v1/instances/{instance}/timeline").raise_for_status().json()
            if any(p["name"] == phase for p in found["phases"]) or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def measured(self) -> list[dict[str, Any]]:
        """The two ready replicas, once the agents have measured them after their first requests."""

        def both(found: list[dict[str, Any]]) -> bool:
            ready = [i for i in found if i["state"] == "ready"]
            return len(ready) == 2 and all((i["members"][0]["memory"] or {}).get("weight_bytes") for i in ready)

        return [i for i in self.wait("two measured replicas", both) if i["state"] == "ready"]

    def memory(self, instance: str) -> int:
        """Proportional set size (bytes) of the instance's process tree, found by the mark in its environment."""
        mark = f"RELIGHT_INSTANCE={instance}".encode()
        total = 0
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (directory / "environ").read_bytes().split(b"\0"):
                    rollup = (directory / "smaps_rollup").read_text()
                    total += int(rollup.partition("\nPss:")[2].split()[0]) << 10
            except OSError:
                continue
        return total


def stand_apart() -> None:
    """Lets this thread go first: a client stands for another machine, and must not wait for the cores under test.

    Without the right to it (it takes root) its waits are in the figures.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)


def covered(timeline: dict[str, Any], begun: float, ended: float) -> float:
    """The share of [begun, ended] that lies in at least one named phase; overlaps count once."""
    total, reached = 0.0, begun
    for phase in sorted(timeline["phases"], key=lambda p: float(p["start"])):
        low, high = max(float(phase["start"]), reached), min(float(phase["end"]), ended)
        if high > low:
            total += high - low
            reached = high
    return total / (ended - begun)


def gaps(wake: Wake) -> str:
    """Where the wall time lies that no phase names: milliseconds after the request, and how many."""
    found, reached = [], wake.begun
    ends = [(float(p["start"]), float(p["end"]), str(p["name"])) for p in wake.timeline["phases"]]
    for start, end, name in [*sorted(ends), (wake.begun + wake.seconds, wake.begun + wake.seconds, "the token")]:
        if start - reached > 0.001:
            found.append(f"{(start - reached) * 1e3:.0f} ms at {(reached - wake.begun) * 1e3:.0f} before {name}")
        reached = max(reached, end)
    return "; ".join(found)


def show_timeline(machine: Machine, instance: str) -> None:
    """`relight timeline INSTANCE`, as a user sees it."""
    sys.stdout.flush()
    subprocess.run([*RELIGHT, "timeline", instance], env=machine.env, check=False, timeout=60)
