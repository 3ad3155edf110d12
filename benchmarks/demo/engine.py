"""Plain `vllm serve`: the baseline's process, its cold start, and requests at an engine's own port."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
MODEL = ROOT / ".cache" / "smollm2"
NAME = "smollm2"
ARGUMENTS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=268435456",
    # The worker runs in the engine core's process: with the default, the core spins on a second core while it waits.
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
)
START_DEADLINE = 900.0
CLIENT = httpx.Client(timeout=300.0, trust_env=False)
"""One client with its connections for all requests: making one takes tens of milliseconds, which no figure is about."""


@dataclass
class Plain:
    """A running plain server; `directory` holds its fresh HOME and caches."""

    process: subprocess.Popen[bytes]
    port: int
    directory: Path
    argv: list[str]
    env: dict[str, str]
    cold_seconds: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, *, keep: bool = False) -> None:
        """Ends the server and its children, by process group, and removes its directory unless it is to be kept."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)


def environment(directory: Path) -> dict[str, str]:
    """The plain arm's whole environment: what Relight's driver sets too, and fresh directories."""
    return {
        **{name: os.environ[name] for name in ("PATH", "LANG", "TZ", "TMPDIR") if name in os.environ},
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONUNBUFFERED": "1",
        "HOME": str(directory / "home"),
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "VLLM_PLUGINS": "",
    }


def warm_page_cache() -> None:
    """Reads what a start reads, so that the disk is no part of any figure."""
    subprocess.run(
        [str(PYTHON), "-c", "import vllm.entrypoints.cli.main, vllm.v1.worker.cpu_worker"],
        env={**os.environ, "VLLM_PLUGINS": ""}, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    (MODEL / "model.safetensors").read_bytes()


def start_cold(directory: Path) -> Plain:
    """Starts plain vLLM with nothing cached; `cold_seconds` runs from process start to the first token."""
    shutil.rmtree(directory, ignore_errors=True)
    return start(directory)


def start(directory: Path, **variables: str) -> Plain:
    """Starts plain vLLM with what an earlier start left in `directory`; `variables` change its environment."""
    (directory / "home").mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [
        str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), *ARGUMENTS,
        "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    env = {**environment(directory), **variables}
    log = (directory / "log").open("wb")
    begun = time.monotonic()
    process = subprocess.Popen(argv, env=env, cwd=directory, stdout=log, stderr=log, start_new_session=True)
    plain = Plain(process, port, directory, argv, env, 0.0)
    try:
        while True:
            if process.poll() is not None or time.monotonic() - begun > START_DEADLINE:
                raise RuntimeError((directory / "log").read_text(errors="replace")[-3000:])
            try:
                if CLIENT.get(f"{plain.url}/health", timeout=1.0).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        with first_token(plain.url, "The capital of France is", 1):
            plain.cold_seconds = time.monotonic() - begun
    except BaseException:
        plain.stop()
        raise
    return plain


def asked(url: str, prompt: str, tokens: int, headers: dict[str, str] | None = None) -> httpx.Request:
    """A streamed completion, ready to be sent."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    return CLIENT.build_request("POST", f"{url}/v1/completions", json=body, headers=headers)


@contextmanager
def streamed(request: httpx.Request) -> Iterator[httpx.Response]:
    """Sends the request and yields when its first token is there; the rest is read at exit."""
    answer = CLIENT.send(request, stream=True)
    try:
        answer.raise_for_status()
        lines = answer.iter_lines()
        for line in lines:
            if line.startswith("data: {"):
                break
        else:
            raise RuntimeError("the stream ended without a token")
        yield answer
        for _ in lines:
            pass
    finally:
        answer.close()


def first_token(url: str, prompt: str, tokens: int) -> AbstractContextManager[httpx.Response]:
    """Asks, and yields when the first token is there."""
    return streamed(asked(url, prompt, tokens))


def complete(url: str, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """One whole completion at an engine's own port: greedy, token ids returned, no early end."""
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    answer = CLIENT.post(f"{url}/v1/completions", json=body)
    answer.raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def process_of(pid: int) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that a process was started with."""
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    env = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
    return [a.decode() for a in argv], dict(e.decode().split("=", 1) for e in env)


OWN_OPTIONS = {
    "--worker-cls": "worker class",
    "--load-format": "load format",
    "--port": "sockets",
}
OWN_VARIABLES = {
    "VLLM_PLUGINS": "worker class",
    "VLLM_SERVER_DEV_MODE": "sleep",
    "HOME": "private directory, fresh in both arms",
    # Relight's agent names every directory that an engine compiles into; plain vLLM's lie in its own HOME.
    **dict.fromkeys((
        "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "TVM_FFI_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "TILELANG_CACHE_DIR", "CUTE_DSL_CACHE_DIR",
        "CUDA_CACHE_PATH",
    ), "private directory, fresh in both arms"),
}  # fmt: skip


def differences(ours: tuple[list[str], dict[str, str]], plain: tuple[list[str], dict[str, str]]) -> dict[str, str]:
    """What differs between both arms: name -> why it may, or `NOT ALLOWED`."""
    found: dict[str, str] = {}
    options = [_options(argv) for argv, _ in (ours, plain)]
    for name in sorted({*options[0], *options[1]}):
        if options[0].get(name) != options[1].get(name):
            found[name] = OWN_OPTIONS.get(name, "NOT ALLOWED")
    for name in sorted({*ours[1], *plain[1]}):
        if ours[1].get(name) != plain[1].get(name):
            own = "sockets and identity" if name.startswith("RELIGHT_") else "NOT ALLOWED"
            found[name] = OWN_VARIABLES.get(name, own)
    return found


def _options(argv: list[str]) -> dict[str, str]:
    """Option -> value; positional words by their place. The interpreter and module are words too."""
    found: dict[str, str] = {}
    words = iter(range(len(argv)))
    for n in words:
        word = argv[n]
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if not equals and n + 1 < len(argv) and not argv[n + 1].startswith("-"):
                value = argv[n + 1]
                next(words)
            found[name] = value
        else:
            found[f"word {n}"] = word
    return found


def dumps(data: object) -> str:
    """One line of JSON."""
    return json.dumps(data, separators=(", ", ": "))
