"""How a serving replica's inter-token latency fares while eight receivers read its weights at half a link's rate.

The replica is a real engine with Relight's worker, on one core, in a network namespace; its tokens are streamed to a
client beside it. Windows with and without readers take turns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from network import inside
from nodes import DEADLINE, Process, say

from relight.agent.engines.vllm_control import call
from relight.transfer import grants

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
MODEL = ROOT / ".cache" / "smollm2"
START_SECONDS = 300.0
TOKENS = 250
"""Streamed in each window: its 99th percentile is the third slowest."""
ARGUMENTS = (
    "--dtype=bfloat16", "--max-model-len=2048", "--max-num-seqs=16", "--enforce-eager",
    "--kv-cache-memory-bytes=268435456",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "--worker-cls", "relight.plugin.vllm.worker.RelightCPUWorker", "--load-format", "relight",
)  # fmt: skip


def start(node: Process, rate: float, stack: ExitStack) -> tuple[str, str]:
    """A real replica in the node's namespace, its source bounded to `rate` bytes per second; (address, grant)."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relight-serving-")))
    directory.chmod(0o700)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(directory), "VLLM_PLUGINS": "relight", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "RELIGHT_INSTANCE": "serving", "RELIGHT_ENGINE_DIR": str(directory),
        "RELIGHT_BIND_HOST": node.address, "RELIGHT_CONTENT_REVISION": "r1", "RELIGHT_SOURCE_RATE": str(int(rate)),
    }  # fmt: skip
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), "--served-model-name", "serving",
        "--host", node.address, "--port", "8000", *ARGUMENTS,
    ]  # fmt: skip
    with (directory / "engine.log").open("wb") as log:
        engine = subprocess.Popen(
            inside(node.space, command), env=environment, cwd=directory, stdout=log, stderr=log, start_new_session=True
        )

    def stop() -> None:
        with suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait(30)

    stack.callback(stop)
    begun = time.monotonic()
    while (
        not (directory / "worker-0.sock").exists()
        or not node.ask(do="healthy", url=f"http://{node.address}:8000")["ok"]
    ):
        if engine.poll() is not None or time.monotonic() - begun > START_SECONDS:
            raise SystemExit("the replica did not start:\n" + (directory / "engine.log").read_text()[-3000:])
        time.sleep(0.5)  # an engine tells nobody when it is up
    key = grants.new_key()
    offer = asyncio.run(call(directory / "worker-0.sock", "open_source", {"key": key}, deadline=30.0))
    claims = grants.Claims("serving", int(offer["generation"]), "", "bench", time.time() + 20 * DEADLINE)
    return offer["addresses"]["tcp"], grants.mint(key, claims)


def latency_ratio(node: Process, readers: Sequence[Process], rate: float, rounds: int) -> dict[str, float]:
    """The 99th percentile of gaps between tokens with readers over that without: medians of `rounds` windows each."""
    with ExitStack() as stack:
        address, grant = start(node, rate, stack)
        url = f"http://{node.address}:8000"
        node.ask(do="stream", url=url, tokens=64)
        found: dict[str, list[float]] = {"quiet": [], "read": []}
        read = 0
        for n in range(rounds):
            for name, gaps in found.items():
                if name == "read":
                    for reader in readers:
                        reader.tell(do="read", name="serving", address=address, grant=grant)
                told = node.ask(do="stream", url=url, tokens=TOKENS)["gaps"]
                gaps.append(statistics.quantiles(told, n=100)[98])
                if name == "read":
                    for reader in readers:
                        reader.process.send_signal(signal.SIGUSR1)
                    read += sum(reader.hear()["bytes"] for reader in readers)
            say(
                f"    latency, round {n + 1} of {rounds}: "
                + ", ".join(f"{k} {v[-1] * 1e3:.1f} ms" for k, v in found.items())
            )
        quiet, busy = statistics.median(found["quiet"]), statistics.median(found["read"])
        return {"itl_p99_quiet": quiet, "itl_p99_read": busy, "ratio": busy / quiet, "read_bytes": float(read)}
