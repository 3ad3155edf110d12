"""Real vLLM: what one start compiles is sealed, published and installed for the next one, which compiles nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relight.agent.cache import probe, trees
from relight.agent.cache.key import EngineStart
from relight.agent.cache.outcome import Verdict
from relight.agent.cache.start import CacheRecord, CompileCache, Prepared
from relight.agent.devices.base import Device
from relight.agent.engines.base import EngineCommand, MemberContext
from relight.agent.engines.vllm import VllmDriver, VllmHandle
from relight.core.records import Desired, InstanceAssignment, ModelSpec
from tests.support.cache import Nodes
from tests.support.live import ENGINE_PYTHON

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
ARGUMENTS = (
    "--dtype=bfloat16", "--max-model-len=512", "--max-num-seqs=16", "--kv-cache-memory-bytes=33554432",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
)  # fmt: skip
READY_SECONDS = 240.0
REQUESTS = 20


class Host:
    """Starts engines as the agent does, with the compile cache around them."""

    def __init__(self, nodes: Nodes, model: Path, directory: Path) -> None:
        self.cache = CompileCache(nodes.ring("host"), nodes.signer, nodes.clock)
        self.driver = VllmDriver(str(ENGINE_PYTHON), (Device("cpu0", "cpu", "cpu0", 4 << 30, cores=(0,)),))
        self.model, self.directory = model, directory

    def described(self, command: EngineCommand) -> EngineStart:
        found = probe.environment(str(ENGINE_PYTHON))
        words = command.argv[command.argv.index(str(self.model)) + 1 :]
        return EngineStart(
            "vllm", str(self.model), words, command.env, found.versions, found.sources, found.code,
            probe.processor(), probe.model_files(self.model),
        )  # fmt: skip

    def run(self, name: str) -> tuple[Prepared, CacheRecord, list[int]]:
        """One whole start: ready, canary (it asks for log-probabilities), requests; the tokens of one of them."""
        spec = ModelSpec("default", "tiny", str(self.model), "r1", "vllm", args=ARGUMENTS)
        wanted = InstanceAssignment(f"i-{name}", spec.key, spec, 0, 1, ("cpu0",), Desired.READY)
        # The path of a unix socket is short, and pytest's directories are not.
        own = self.directory / name
        own.mkdir()
        context = MemberContext(wanted, own, own / "log", "127.0.0.1")
        command = self.driver.command(context)
        prepared = self.cache.prepare(self.described(command), own / "compile", 60.0)
        with _running(command, {**prepared.environment, "RELIGHT_INSTANCE": wanted.instance}, context.log_path):
            tokens = asyncio.run(_asked(self.driver.handle(context)))
            record = self.cache.finish(prepared, context.log_path.read_text())
        return prepared, record, tokens


async def _asked(handle: VllmHandle) -> list[int]:
    await handle.wait_ready(READY_SECONDS, lambda _: None)
    await handle.describe()
    await handle.record_canary()
    tokens: list[int] = []
    for n in range(REQUESTS):
        tokens, _ = await handle._generate([1, 2, 3 + n, 4], 60.0)
    await handle.close()
    return tokens


@contextmanager
def _running(command: EngineCommand, more: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.argv, env={**command.env, **more}, cwd=command.cwd, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path("/tmp") / f"relight-compile-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_second_start_loads_what_the_first_compiled_and_compiles_nothing(
    tiny_model: Path, directory: Path, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path / "nodes")
    nodes.start("a", "b", "c")
    try:
        host = Host(nodes, tiny_model, directory)
        _, cold, expected = host.run("1")
        assert cold.outcome is not None
        assert cold.outcome.verdict is Verdict.COMPILED
        assert cold.outcome.compiled > 0
        assert cold.published, cold.not_published
        # Nothing of the first is left for the second to find by itself.
        shutil.rmtree(directory / "1" / "compile")
        prepared, warm, tokens = host.run("2")
    finally:
        nodes.close()
    assert warm.key == cold.key
    assert warm.outcome is not None
    assert (warm.outcome.installed, warm.outcome.selected, warm.outcome.hit) == (True, True, True), warm.outcome
    assert warm.outcome.compiled == 0
    log = (directory / "2" / "log").read_text()
    assert "Directly load AOT compilation from path" in log
    assert "Compiling model again" not in log
    after = trees.scan(prepared.root, "vllm")
    assert not after.new_since(prepared.before)
    assert tokens == expected
    assert warm.saved is not None
    assert warm.saved > 0
    print(f"cold {cold.outcome}; warm {warm}")
