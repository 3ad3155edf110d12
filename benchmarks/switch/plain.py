"""Plain `vllm serve` of either model: started with warm caches, ended, and asked the one prompt."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import engine

ARGUMENTS = (
    "--dtype=bfloat16",
    "--max-model-len=512",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=134217728",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
)
PROMPT = "The capital of France is"
TOKENS = 16
"""Of the answer that proves more than its first token does."""


@dataclass(frozen=True)
class Model:
    """One of the two, by the name that it is served under."""

    name: str
    path: Path

    def asked(self, tokens: int = 1) -> dict[str, Any]:
        """The body of a request; that for one token is what every way is timed by."""
        return {"model": self.name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@dataclass
class Served:
    """A running server."""

    model: Model
    process: subprocess.Popen[bytes]
    url: str

    def answer(self, tokens: int = 1) -> str:
        """What it says to the prompt."""
        return completed(self.url, self.model.asked(tokens))[0]

    def stop(self) -> None:
        """Ends it and its children; its caches stay."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)


def serve(model: Model, directory: Path) -> Served:
    """Starts it with what an earlier start left in `directory`; returns when it is healthy."""
    (directory / "home").mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [
        str(engine.PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model.path), *ARGUMENTS,
        "--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    # The plugin alone lets vLLM load the artefact that it wrote itself.
    env = {**engine.environment(directory), "VLLM_PLUGINS": "relight"}
    begun = time.monotonic()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(argv, env=env, cwd=directory, stdout=log, stderr=log, start_new_session=True)
    served = Served(model, process, f"http://127.0.0.1:{port}")
    while True:
        if process.poll() is not None or time.monotonic() - begun > engine.START_DEADLINE:
            served.stop()
            raise RuntimeError((directory / "log").read_text(errors="replace")[-3000:])
        try:
            if engine.CLIENT.get(f"{served.url}/health", timeout=1.0).status_code == 200:
                return served
        except httpx.TransportError:
            time.sleep(0.05)


def completed(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[str, str]:
    """The text of a completion, and which instance gave it; empty for a plain server."""
    reply = engine.CLIENT.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status()
    return str(reply.json()["choices"][0]["text"]), reply.headers.get("x-relight-instance", "")


def restart(running: Served, model: Model, directory: Path) -> tuple[Served, float, str]:
    """Ends one server and starts the other. Returns it, the seconds to its answer, and the answer."""
    begun = time.monotonic()
    running.stop()
    served = serve(model, directory)
    text = served.answer()
    return served, time.monotonic() - begun, text
