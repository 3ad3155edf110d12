"""`relight up` and `relight down`: one machine's components as processes, with progress while engines start."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from relight.controller.cli import pki
from relight.controller.cli.client import Client
from relight.controller.cli.home import Home, Process, start_time
from relight.controller.cli.machine import MachineConfig, NodeEntry
from relight.core.auth import Role, hash_token, new_token
from relight.core.clock import Clock
from relight.core.errors import Conflict, FieldError, InvalidInput, RelightError, Unavailable

COMPONENT_SECONDS = 30.0
"""How long a component may take until it answers."""
END_SECONDS = 20.0
LOOPBACK = "127.0.0.1"
Say = Callable[[str], None]


class StartFailed(RelightError):
    """Something that `up` waits for cannot come: what was started was ended again, or the reason is told."""

    code = "start-failed"


def up(config: MachineConfig, home: Home, clock: Clock, say: Say) -> Client:
    """Starts everything and returns a client for the controller. Raises before anything runs, or ends it all."""
    running = home.running()
    if running:
        names = ", ".join(p.name for p in running)
        raise Conflict(f"already up in {home.path}: {names}; `relight down` ends it")
    _check_ports(config)
    home.create()
    files = _write(config, home, clock)
    try:
        for name, module, file in files:
            process = _start(home, name, module, file)
            say(f"{name} started (pid {process.pid})")
            if name == "controller":
                _await(f"http://{LOOPBACK}:{config.ports.controller}/readyz", process, home, clock, ready_only=False)
        gateway = next(p for p in home.processes() if p.name == "gateway")
        _await(f"http://{LOOPBACK}:{config.ports.gateway}/healthz", gateway, home, clock, ready_only=False)
    except BaseException:
        down(home, say)
        raise
    return Client(*home.connect())


def _check_ports(config: MachineConfig) -> None:
    wanted = {f"ports.{name}": port for name, port in config.ports.model_dump().items()}
    wanted |= {f"nodes.{node.name}.metrics_port": node.metrics_port for node in config.nodes if node.metrics_port}
    for name, port in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise InvalidInput(
                    "a port is taken", [FieldError(name, "a free port", f"{port} ({error.strerror})")]
                ) from error


def _write(config: MachineConfig, home: Home, clock: Clock) -> list[tuple[str, str, Path]]:
    """Writes tokens, certificates and one file per component; returns (name, module, file) in starting order."""
    names = ("controller", "gateway", *(f"agent-{n.name}" for n in config.nodes))
    pki.make(home.path / "tls", names, clock)

    def tls(name: str) -> dict[str, str]:
        base = home.path / "tls"
        return {
            "certificate": str(base / f"{name}.pem"),
            "private_key": str(base / f"{name}.key"),
            "authority": str(base / "ca.pem"),
        }

    tokens = {name: new_token() for name in ("operator", "gateway", "agent")}

    def entry(name: str, *roles: Role) -> dict[str, Any]:
        return {"sha256": hash_token(tokens[name]), "name": name, "roles": list(roles)}

    fleet = f"{LOOPBACK}:{config.ports.fleet}"
    operator = entry("operator", Role.OPERATOR, Role.VIEWER)
    controller = {
        "state_path": str(home.path / "controller" / "state.sqlite"),
        "http": {"host": LOOPBACK, "port": config.ports.controller},
        "grpc": {"host": LOOPBACK, "port": config.ports.fleet, "tls": tls("controller")},
        "tokens": [operator, entry("gateway", Role.GATEWAY), entry("agent", Role.AGENT)],
        "models": [model.model_dump(mode="json") for model in config.models],
        "log_level": config.log_level,
        "otlp_endpoint": config.otlp_endpoint,
    }
    (home.path / "controller").mkdir(mode=0o700, exist_ok=True)
    gateway = {
        "controller_address": fleet,
        "token": tokens["gateway"],
        "tls": tls("gateway"),
        "host": LOOPBACK,
        "port": config.ports.gateway,
        "tokens": [operator],
        "hold": config.hold.model_dump(),
        "log_level": config.log_level,
    }
    home.write("connection.json", {
        "url": f"http://{LOOPBACK}:{config.ports.controller}",
        "token": tokens["operator"],
        "gateway": f"http://{LOOPBACK}:{config.ports.gateway}",
    })  # fmt: skip
    files = [("controller", "relight.controller", home.write("config/controller.json", controller))]
    for node in config.nodes:
        agent = _agent(
            config,
            node,
            home,
            fleet,
            tokens,
            tls(f"agent-{node.name}"),
        )
        files.append((f"agent-{node.name}", "relight.agent", home.write(f"config/agent-{node.name}.json", agent)))
    files.append(("gateway", "relight.gateway", home.write("config/gateway.json", gateway)))
    return files


def _agent(
    config: MachineConfig,
    node: NodeEntry,
    home: Home,
    fleet: str,
    tokens: dict[str, str],
    tls: dict[str, str],
) -> dict[str, Any]:
    return {
        "slot": node.name,
        "controller_address": fleet,
        "token": tokens["agent"],
        "tls": tls,
        "state_dir": str(home.path / "nodes" / node.name),
        "force_tcp": node.force_tcp,
        "data_tls": config.data_tls,
        "digests": config.digests,
        "rdma": node.rdma,
        "source_rate": node.source_rate,
        "compile_cache": {
            "enabled": config.compile_cache.enabled,
            "quota_bytes": config.compile_cache.quota,
            "archive": config.compile_cache.archive,
            "trusted_keys": list(config.compile_cache.trusted_keys),
        },
        "ignore_locks": list(node.ignore_locks),
        "host_tier": {"budget_bytes": node.host_memory or 0},
        "metrics_port": node.metrics_port,
        "devices": [{"id": d.id, "cores": list(d.cores), "memory_bytes": d.memory} for d in node.devices],
        "accelerators": node.accelerators.model_dump() if node.accelerators else None,
        "engines": {name: engine.model_dump() for name, engine in config.engines.items()},
        "log_level": config.log_level,
    }


def _start(home: Home, name: str, module: str, file: Path) -> Process:
    log = home.path / "logs" / f"{name}.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(file)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/", env={**os.environ},
        )  # fmt: skip
    process = Process(name, child.pid, start_time(child.pid) or 0)
    home.record(process)
    return process


def _await(url: str, process: Process, home: Home, clock: Clock, *, ready_only: bool) -> None:
    """Returns when `url` answers. Raises Unavailable with the end of the log when the process ended or is late."""
    deadline = clock.monotonic() + COMPONENT_SECONDS
    pause = Event()
    while clock.monotonic() < deadline:
        try:
            answer = httpx.get(url, timeout=1.0, trust_env=False)
        except httpx.TransportError:
            if process.wait(0):
                break
            pause.wait(0.05)
            continue
        if answer.status_code == 200 or not ready_only:
            return
    log = home.path / "logs" / f"{process.name}.log"
    tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
    raise Unavailable(f"{process.name} did not come up; the end of {log}:\n{tail}")


def down(home: Home, say: Say) -> int:
    """Ends every component and every engine of this machine; returns how many processes it ended."""
    ended = 0
    components = home.processes()
    # Agents first, so that nobody restarts what the supervisors end; the controller last, to hear of it.
    order = sorted(components, key=lambda p: (not p.name.startswith("agent"), p.name == "controller"))
    for process in order:
        if process.alive():
            process.signal(signal.SIGTERM)
            if not process.wait(END_SECONDS):
                process.signal(signal.SIGKILL)
                process.wait(END_SECONDS)
            ended += 1
            say(f"{process.name} ended")
        home.forget(process)
        if process.name.startswith("agent-"):
            ended += _end_supervisor(home, process.name.removeprefix("agent-"), say)
    home.connection.unlink(missing_ok=True)
    return ended


def _end_supervisor(home: Home, node: str, say: Say) -> int:
    """Ends a node's supervisor, and with it all engines, by the pid that the kernel says answers its socket."""
    path = home.path / "nodes" / node / "s" / "supervisor.sock"
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return 0
    supervisor = Process(f"supervisor-{node}", pid, start_time(pid) or 0)
    supervisor.signal(signal.SIGTERM)
    if not supervisor.wait(2 * END_SECONDS):
        supervisor.signal(signal.SIGKILL)
        supervisor.wait(END_SECONDS)
    say(f"engines of {node} ended")
    return 1
