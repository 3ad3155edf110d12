"""One machine brought up by the command line as a user would, with real engines, and ways to ask and hurt it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
RELIGHT = [sys.executable, "-m", "relight.controller.cli"]
UP_DEADLINE, DEADLINE = 420.0, 90.0
EAGER = (
    "--dtype=bfloat16",
    "--max-model-len=512",
    "--max-num-seqs=64",
    "--enforce-eager",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


SPEC: dict[str, Any] = {"engine": "vllm", "revision": "r1", "replicas": 1, "guardians": {"replicas": 1}}


class Live:
    """A running machine: two nodes with a device each, or one for each core, and one model."""

    def __init__(
        self, directory: Path, model: dict[str, Any], *, both_cores: bool = False, data_tls: bool = False,
        digests: str = "xxh3", host_memory: str = "", engines: dict[str, Path] | None = None,
    ) -> None:  # fmt: skip
        """`host_memory` is what each node may keep copies in, none when empty; `engines` the interpreter of each."""
        self._engines = engines or {"vllm": ENGINE_PYTHON}
        self._node = {"host_memory": host_memory} if host_memory else {}
        self.directory, self.model, self._both_cores, self._data_tls = directory, model, both_cores, data_tls
        self._digests = digests
        self.state = directory / "state"
        self.env = {**os.environ, "RELIGHT_STATE": str(self.state)}
        self._restarted: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        controller, fleet, gateway = free_ports(3)
        config = {
            "ports": {"controller": controller, "fleet": fleet, "gateway": gateway},
            "data_tls": self._data_tls,
            "digests": self._digests,
            "engines": {name: {"python": str(python)} for name, python in self._engines.items()},
            "nodes": [
                {
                    "name": f"node-{n}",
                    **self._node,
                    "devices": [
                        {"id": f"cpu{core}", "cores": [core], "memory": "5GiB"}
                        for core in ((0, 1) if self._both_cores else (i,))
                    ],
                }
                for i, n in enumerate("ab")
            ],
            "models": [{**SPEC, **self.model}],
        }
        path = self.directory / "machine.yaml"
        path.write_text(json.dumps(config))
        done = subprocess.run(
            [*RELIGHT, "up", "-f", str(path), "--timeout", str(UP_DEADLINE)],
            env=self.env, capture_output=True, text=True, timeout=UP_DEADLINE + 60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"relight up: {done.stderr[-3000:]}\n{self.logs()}")
        said = json.loads((self.state / "connection.json").read_text())
        self.gateway = said["gateway"]
        self.headers = {"authorization": f"Bearer {said['token']}"}
        self.api = httpx.Client(base_url=said["url"], headers=self.headers, timeout=DEADLINE, trust_env=False)
        self.path = f"/api/v1/namespaces/default/models/{self.model['name']}"

    def down(self) -> None:
        # Those that a test started again are not known to `down`, and an agent would start a supervisor again.
        for process in self._restarted:
            process.terminate()
            process.wait(20)
        self.cli("down")
        if hasattr(self, "api"):
            self.api.close()
        left = self.left_over()
        assert not left, f"left behind: {left}"

    def left_over(self) -> list[str]:
        """Command lines of processes that still speak of this machine's directory."""
        mark = str(self.directory).encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes()
                if mark in line or mark in (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {line.replace(bytes(1), b' ').decode(errors='replace')[:120]}")
            except OSError:
                continue
        return found

    def logs(self) -> str:
        found = [*self.state.glob("logs/*.log"), *self.state.glob("nodes/*/logs/*.log")]
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-1500:]}" for p in found)

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RELIGHT, *words], env=self.env, capture_output=True, text=True, timeout=120, check=False
        )  # fmt: skip

    # ------------------------------------------------------------------ asking

    def instances(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.api.get("/api/v1/instances").raise_for_status().json()["items"]
        return items

    def wait(self, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The instances once `holds` is true of them; each look is a round trip."""
        deadline = time.monotonic() + DEADLINE
        pause = threading.Event()
        while not holds(found := self.instances()):
            told = [(i["id"], i["state"], i["cause"], i["failure"]) for i in found]
            assert time.monotonic() < deadline, told
            pause.wait(0.1)
        return found

    def settle(self, ready: int) -> list[dict[str, Any]]:
        """Once exactly `ready` are ready and every other one is dormant."""

        def settled(found: list[dict[str, Any]]) -> bool:
            states = [i["state"] for i in found]
            return states.count("ready") == ready and states.count("dormant") == len(states) - ready

        return self.wait(settled)

    def change(self, **changes: Any) -> None:
        """Writes the model's specification with these fields changed."""
        body = {k: v for k, v in {**SPEC, **self.model, **changes}.items() if k != "name"}
        self.api.put(self.path, json=body).raise_for_status()

    def scale(self, replicas: int, *rungs: str) -> dict[str, Any]:
        body: dict[str, Any] = {"replicas": replicas, **({"rungs": list(rungs)} if rungs else {})}
        operation: dict[str, Any] = self.api.put(f"{self.path}/scale", json=body).raise_for_status().json()
        return operation

    def ended(self, operation: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE
        while operation["state"] == "running":
            assert time.monotonic() < deadline, operation
            path = f"/api/v1/operations/{operation['id']}"
            operation = self.api.get(path, params={"wait": 20}).raise_for_status().json()
        return operation

    def scaled(self, replicas: int, *rungs: str) -> list[dict[str, Any]]:
        """Scales, sees the operation done, and waits until nothing moves."""
        operation = self.ended(self.scale(replicas, *rungs))
        assert operation["state"] == "done", operation
        return self.settle(replicas)

    def timeline(self, instance: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/api/v1/instances/{instance}/timeline").raise_for_status().json()
        return found

    def tokens(self, url: str, prompt: str = "the replica wakes", count: int = 16) -> list[int]:
        """Greedy token ids from an engine's own port."""
        body = {
            "model": self.model["name"], "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE, trust_env=False)
        return list(answer.raise_for_status().json()["choices"][0]["token_ids"])

    def ask(self, prompt: str, count: int = 8, headers: dict[str, str] | None = None) -> httpx.Response:
        """One completion through the gateway, not streamed."""
        body = {
            "model": self.model["name"],
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
        }
        return httpx.post(
            f"{self.gateway}/v1/completions", json=body, headers=headers, timeout=DEADLINE, trust_env=False
        )  # fmt: skip

    def until_held(self, count: int) -> None:
        """Waits until the gateway holds so many requests; each look is a round trip."""
        deadline, pause = time.monotonic() + DEADLINE, threading.Event()
        while True:
            text = httpx.get(f"{self.gateway}/metrics", headers=self.headers, timeout=DEADLINE, trust_env=False).text
            rows = [line for line in text.splitlines() if line.startswith("relight_gateway_requests_held{")]
            if sum(float(row.rpartition(" ")[2]) for row in rows) >= count:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateway does not hold {count} requests: {rows}")
            pause.wait(0.02)

    def ask_many(self, count: int) -> list[httpx.Response]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda n: self.ask(f"number {n}"), range(count)))

    # ------------------------------------------------------------------ hurting

    def component(self, name: str) -> int:
        return int(json.loads((self.state / "run" / f"{name}.json").read_text())["pid"])

    def kill(self, pid: int) -> None:
        """kill -9 and wait until the process is gone."""
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        import select

        assert select.select([descriptor], [], [], 20)[0]
        os.close(descriptor)

    def restart(self, name: str, module: str) -> None:
        """Starts a killed component again from the file that `up` wrote."""
        log = (self.state / "logs" / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(self.state / "config" / f"{name}.json")],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        self._restarted.append(process)

    def processes(self, instance: str) -> list[int]:
        """Pids that carry the instance's mark."""
        mark = f"RELIGHT_INSTANCE={instance}".encode()
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
            except OSError:
                continue
        return found

    def memory(self, instance: str) -> int:
        """Proportional set size (bytes) of the instance's processes."""
        total = 0
        for pid in self.processes(instance):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(rollup.partition("\nPss:")[2].split()[0]) << 10
        return total


def endpoint(instance: dict[str, Any]) -> str:
    return str(instance["members"][0]["endpoint"])


def same_tokens(machine: Live) -> bool:
    """Whether the two ready replicas, each asked at its own port, give the same token ids."""
    ready = by_state(machine.instances(), "ready")
    assert len(ready) == 2, ready
    first, second = (machine.tokens(endpoint(i)) for i in ready)
    return first == second


def by_state(found: list[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    return [i for i in found if i["state"] == state]
