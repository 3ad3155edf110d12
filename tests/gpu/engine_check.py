"""vLLM on one GPU, driven as an agent drives it: python -m tests.gpu.engine_check. Under eight minutes.

    RELIGHT_GPU_PYTHON   an interpreter with vLLM for GPUs (and Relight's plugin by PYTHONPATH)
    RELIGHT_GPU_MODEL    a model's directory; .cache/smollm2 without it

Cold and warm starts, a lazy one with its graphs captured late, sleeps at both levels and their wakes, what a sleeper
keeps, and how fast a woken engine decodes, against the same engine before it slept. All by VllmDriver and its handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from relight.agent.devices.base import Device
from relight.agent.engines.base import EngineCommand, MemberContext
from relight.agent.engines.vllm import VllmDriver
from relight.agent.engines.vllm_handle import VllmHandle
from relight.core.records import Desired, InstanceAssignment, Mode, ModelSpec, OnTimeout, Proving, Rung, RungKind
from relight.plugin import look
from tests.gpu.table import Table

if TYPE_CHECKING:
    from relight.agent.surroundings import Surroundings

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("RELIGHT_GPU_PYTHON", "")
MODEL = os.environ.get("RELIGHT_GPU_MODEL", str(ROOT / ".cache" / "smollm2"))
ARGUMENTS = ("--dtype=bfloat16", "--max-model-len=2048", "--max-num-seqs=64", "--kv-cache-memory-bytes=4294967296")
SECONDS = 460.0
"""Of the whole check: the lease that it is made for has eight minutes."""
START_SECONDS = 200.0
TOKENS, TRIES, CANARY = 256, 3, 8
LEAST_DECODE = 0.95
"""Share of the speed before its sleep that a woken engine must decode at."""
LEAST_FREED = 0.9
"""Share of weights and cache that a sleep at level 2 must give back."""
DEVICE = Device("gpu-0", "nvidia", "gpu-0", 1 << 37)


class Here:
    """Where engines run: on this machine, in this process's own surroundings."""

    here = True
    variables: Mapping[str, str] = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RELIGHT_"))}

    async def ask(self, python: str, question: Mapping[str, Any]) -> Any:
        return look.answer(dict(question))


class Started:
    """One engine: how it was started, its handle, and how long it took to be ready and to its first token."""

    def __init__(self, process: asyncio.subprocess.Process, handle: VllmHandle) -> None:
        self.process, self.handle = process, handle
        self.ready = self.first = 0.0

    async def decode(self) -> float:
        """Tokens per second of one request, the median of some."""
        speeds = []
        for _ in range(TRIES):
            begun = time.perf_counter()
            await self.handle._api.complete([1, 17, 5, 99], 60.0, max_tokens=TOKENS)
            speeds.append(TOKENS / (time.perf_counter() - begun))
        return statistics.median(speeds)


def _held() -> int:
    """Bytes of the device in use, by its own word."""
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]) << 20


def _prepare(directory: Path, caches: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "compile").symlink_to(caches)


@asynccontextmanager
async def started(directory: Path, mode: Mode, caches: Path, name: str = "i-gpu") -> AsyncIterator[Started]:
    """`caches` is where all starts compile, so that a second one is warm."""
    _prepare(directory, caches)
    own = {"PYTHONPATH": str(ROOT / "src")}
    spec = ModelSpec("default", "m", MODEL, "r1", "vllm", args=ARGUMENTS, env=own, proof=Proving(tokens=CANARY))
    wanted = InstanceAssignment(
        name, spec.key, spec, 0, 1, (DEVICE.id,), Desired.READY, mode=mode, content_revision="r1"
    )  # fmt: skip
    context = MemberContext(wanted, directory, directory / "log", "127.0.0.1")
    driver = VllmDriver((DEVICE,), cast("Surroundings", Here()), PYTHON, zygote=False)
    command = await driver.command(context)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    env = {**command.env, "CUDA_VISIBLE_DEVICES": visible, "RELIGHT_INSTANCE": name}
    begun = time.perf_counter()
    process = await _spawn(command, env, context.log_path)
    handle = driver.handle(context)
    assert isinstance(handle, VllmHandle)
    engine = Started(process, handle)
    try:
        await handle.wait_ready(START_SECONDS, lambda said: None)
        engine.ready = time.perf_counter() - begun
        await handle.prove_or_record()
        engine.first = time.perf_counter() - begun
        yield engine
    except BaseException:
        print(context.log_path.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        await handle.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def _spawn(command: EngineCommand, env: Mapping[str, str], log: Path) -> asyncio.subprocess.Process:
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *command.argv, env=env, cwd=command.cwd, stdout=file, stderr=file, start_new_session=True
        )


async def _cycle(table: Table, engine: Started, level: int, kind: RungKind, idle: int) -> None:
    """One sleep and one wake, proven."""
    handle, name = engine.handle, f"level {level}"
    weights, cache, _ = await handle.resident()
    await handle.wait_idle(30.0, OnTimeout.WAIT)
    awake, begun = _held(), time.perf_counter()
    await handle.sleep(level)
    table.row(f"{name}: sleep", time.perf_counter() - begun, "s")
    asleep = _held()
    table.row(f"{name}: a sleeper keeps", (asleep - idle) / 2**20, "MiB")
    freed = (awake - asleep) / max(weights + cache, 1)
    table.row(f"{name}: share of weights and cache given back", freed)
    table.must(f"{name}: at least {LEAST_FREED} of it", freed >= LEAST_FREED, f"{freed:.2f}")
    begun = time.perf_counter()
    await handle.refill(Rung(kind, "check"), "r1", lambda said: None)
    await handle.resume()
    proof, _ = await handle.prove()
    table.row(f"{name}: wake by {kind}, proven", time.perf_counter() - begun, "s")
    table.must(f"{name}: the same tokens and log-probabilities", proof.tokens == CANARY)


async def check(table: Table, scratch: Path) -> None:
    caches, idle = scratch / "caches", _held()
    caches.mkdir()
    async with started(scratch / "cold", Mode.COLD, caches) as engine:
        table.row("cold start, to the first token", engine.first, "s")
    async with started(scratch / "warm", Mode.COLD, caches) as engine:
        table.row("warm start, to the first token", engine.first, "s")
        plain = await engine.decode()
        table.row("decode before any sleep", plain, "tokens/s")
        await _cycle(table, engine, 1, RungKind.HOST_COPY, idle)
        await _cycle(table, engine, 2, RungKind.DISK, idle)
        share = await engine.decode() / plain
        table.row("decode after both wakes, share", share)
        table.must(f"at least {LEAST_DECODE} of it", share >= LEAST_DECODE, f"{share:.2f}")
    async with started(scratch / "lazy", Mode.LAZY, caches) as engine:
        table.row("lazy start, to the first token", engine.first, "s")
        begun, pieces = time.perf_counter(), 1
        while await engine.handle.complete():
            pieces += 1
        table.row("its other graphs", f"{pieces} pieces in {time.perf_counter() - begun:.1f} s")
        table.row("decode with all of them, share", await engine.decode() / plain)


async def main() -> int:
    if not PYTHON:
        sys.exit("RELIGHT_GPU_PYTHON names no interpreter with vLLM for GPUs")
    table = Table(f"vLLM by {PYTHON}, {MODEL}")
    scratch = Path(tempfile.mkdtemp(prefix="rl-gpu-"))
    try:
        async with asyncio.timeout(SECONDS):
            await check(table, scratch)
    except Exception as error:  # noqa: BLE001 - what was measured until then is shown
        table.must("the whole check", False, f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return table.show()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
