"""The OpenAPI document tells the truth: every check of schemathesis against a running controller."""

import asyncio
import shutil
import sys
from pathlib import Path

from relight.core.records import CacheReport
from support.controlplane import TOKENS, FakeAgent, FakeGateway, Running, model

CONFIG = Path(__file__).with_name("schemathesis.toml")
SECONDS = 110


async def test_schemathesis_finds_no_failure(tmp_path):
    running = await Running.start(
        tmp_path, models=[model(replicas=1)], event_stream_seconds=0.05, slot_grace_seconds=0.5
    )
    agent, door = FakeAgent("a", running.rpc, devices=2), FakeGateway(running.rpc)
    agent.cache = CacheReport("tcp:127.0.0.1:1", "0" * 64, grant_key="1" * 64)
    await agent.serve_logs()
    agent.attach()
    door.attach()
    await door.until(lambda t: t.models[0].replicas)
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    process = await asyncio.create_subprocess_exec(
        command, "--config-file", str(CONFIG), "run", f"{running.base}/openapi.json",
        "--header", f"Authorization: Bearer {TOKENS['operator']}",
        "--checks", "all", "--phases", "coverage,fuzzing", "--max-examples", "8", "--seed", "1",
        "--request-timeout", "10", "--no-color",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    try:
        async with asyncio.timeout(SECONDS):
            told, _ = await process.communicate()
        assert process.returncode == 0, told.decode()[-8000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await door.detach()
        await agent.detach()
        await running.stop()
