"""Every call of the handle for a vLLM without Relight in it, against a real vLLM on the CPU, whose worker answers and
frees nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from relight.agent.engines.base import MemberContext
from relight.agent.engines.vllm_handle import endpoint_file
from relight.agent.engines.vllm_outside import VllmOutsideHandle
from relight.core.clock import SystemClock
from relight.core.records import Desired, InstanceAssignment, ModelSpec, OnTimeout, Rung, RungKind

pytestmark = [pytest.mark.engines, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
CACHE_BYTES = 33554432
ARGUMENTS = (
    "--dtype=bfloat16", "--enforce-eager", "--max-model-len=256", "--max-num-seqs=4",
    f"--kv-cache-memory-bytes={CACHE_BYTES}",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
)  # fmt: skip
START_SECONDS = 150.0


@pytest.fixture(scope="module")
def tiny() -> Path:
    assert PYTHON.exists(), "no engine environment: run `make setup-engine`"
    path = ROOT / ".cache" / "tiny-qwen3"
    if not (path / "model.safetensors").exists():
        script = ROOT / "scripts" / "make_tiny_model.py"
        subprocess.run([str(PYTHON), str(script), str(path)], check=True, timeout=120)
    return path


@pytest.fixture
async def engine(tiny: Path, tmp_path: Path) -> AsyncIterator[VllmOutsideHandle]:
    """Stock: no part of Relight is in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = ModelSpec("default", "m", str(tiny), "r1", "vllm", args=ARGUMENTS)
    wanted = InstanceAssignment("i-a", spec.key, spec, 0, 1, ("gpu-0",), Desired.READY, content_revision="r1")
    facts = {"host": "127.0.0.1", "port": port, "cache_bytes": CACHE_BYTES, "cannot_sleep": ""}
    endpoint_file(tmp_path).write_text(json.dumps(facts))
    env = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    argv = (
        str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(tiny), *ARGUMENTS, "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port),
    )  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *argv, env=env, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    handle = VllmOutsideHandle(MemberContext(wanted, tmp_path, tmp_path / "log", "127.0.0.1"), SystemClock())
    try:
        await handle.wait_ready(START_SECONDS, lambda said: None)
        yield handle
    finally:
        print((tmp_path / "log").read_text()[-3000:])
        await handle.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def test_every_call_of_the_handle_is_answered_by_a_real_vllm(
    engine: VllmOutsideHandle, record_property: Callable[[str, object], None]
) -> None:
    facts = await engine.describe()
    version = facts.fingerprint.layout["engine"]
    assert version.startswith("vllm 0.32.0")
    assert (await engine.prove_or_record())[0] is None
    await engine.warm_up(16)
    assert (await engine.health()).alive
    await engine.wait_idle(10.0, OnTimeout.WAIT)
    for _ in range(2):
        await engine.sleep(2)
        # A wake that comes to nothing, and one that does not.
        await engine.refill(Rung(RungKind.DISK, "test"), "r1", lambda said: None)
        await engine.suspend()
        refill = await engine.refill(Rung(RungKind.DISK, "test"), "r1", lambda said: None)
        assert "agree" in refill.detail
        assert not refill.detail.startswith("digests of 0 ")
        await engine.resume()
        proof, _ = await engine.prove()
        assert proof.tokens == 1
    record_property("versions", "vllm 0.32.0")
