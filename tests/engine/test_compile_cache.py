"""Real vLLM by a real agent: forked from a zygote; what one start compiles is published, and later ones load it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import httpx
import pytest

from relight.agent.cache import trees
from relight.core.records import (
    CacheRing,
    Desired,
    InstanceReport,
    Mode,
    ModelSpec,
    RingNode,
    RungKind,
    Shapes,
    StartCache,
)
from relight.core.states import State
from relight.protos.relight.v1 import fleet_pb2_grpc
from relight.transfer.grants import Claims, mint
from tests.support import agent
from tests.support.agent import Fleet, Slot
from tests.support.live import ENGINE_PYTHON

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
ARGUMENTS = (
    "--dtype=bfloat16", "--max-model-len=512", "--max-num-seqs=16", "--kv-cache-memory-bytes=33554432",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
)  # fmt: skip
READY_SECONDS = 240.0
REQUESTS = 20


@pytest.fixture
async def slot(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Slot]:
    """An agent with vLLM, whose own node is all of the ring."""
    monkeypatch.setattr(agent, "DEADLINE", READY_SECONDS)
    server, fleet = grpc.aio.server(), Fleet()
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    fleet.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # The path of a unix socket is short, and pytest's directories are not.
    with tempfile.TemporaryDirectory(prefix="rl-") as root:
        config = {
            "slot": "a",
            "controller_address": f"127.0.0.1:{fleet.port}",
            "token": agent.TOKEN,
            "state_dir": f"{root}/state",
            "devices": [{"id": "cpu-0", "cores": [0], "memory_bytes": 4 << 30}],
            "engines": {"vllm": {"python": str(ENGINE_PYTHON)}},
        }
        made = Slot(fleet, Path(root), config)
        await made.up()
        try:
            cache = (await fleet.until(lambda r: r.cache)).cache
            grant = mint(cache.grant_key, Claims("a", 0, "", "a", 4e9))
            made.ring = CacheRing(1, 2, (RingNode("a", cache.address, grant),), (cache.signer,))
            yield made
        finally:
            await made.down()
            await server.stop(0)


def _allowed(instance: str) -> list[set[str]]:
    """Of each process of the instance, the processors that its threads may use."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"={instance}\0".encode() not in (process / "environ").read_bytes():
                continue
            lines = [line for t in (process / "task").iterdir() for line in (t / "status").read_text().splitlines()]
        except OSError:
            continue
        found.append({line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")})
    return found


async def test_workers_of_a_forked_engine_run_where_the_model_binds_them(slot: Slot, tiny_model: Path) -> None:
    last = str(max(os.sched_getaffinity(0)))
    bound = ("--distributed-executor-backend=mp", "--enforce-eager")
    spec = ModelSpec(
        "default", "tiny", str(tiny_model), "r1", "vllm", args=(*ARGUMENTS[:-1], *bound),
        env={"VLLM_CPU_OMP_THREADS_BIND": last},
    )  # fmt: skip
    wanted = slot.instance("i-bound", Desired.READY, mode=Mode.NORMAL, rungs=agent.rungs(RungKind.DISK))
    slot.want(replace(wanted, model=spec.key, spec=spec, deadline_seconds=READY_SECONDS))
    ready = await slot.until("i-bound", State.READY)
    assert ready.start is not None
    assert ready.start.process.startswith("forked from a zygote")
    allowed = _allowed("i-bound")
    # The worker is bound with all of its threads; server and engine core are not.
    assert allowed.count({last}) == 1, allowed
    assert all(processors == {last} or last not in processors for processors in allowed), allowed


async def _run(
    slot: Slot, model: Path, name: str, mode: Mode = Mode.NORMAL, shapes: Shapes | None = None
) -> tuple[StartCache, InstanceReport, list[int]]:
    """One whole start and some requests; what the ring did, and the tokens of the last request."""
    spec = ModelSpec("default", "tiny", str(model), "r1", "vllm", args=ARGUMENTS)
    wanted = slot.instance(name, Desired.READY, mode=mode, rungs=agent.rungs(RungKind.DISK))
    slot.want(replace(wanted, model=spec.key, spec=spec, deadline_seconds=READY_SECONDS, shapes=shapes))
    ready = await slot.until(name, State.READY)
    assert ready.endpoint is not None
    async with httpx.AsyncClient(base_url=ready.endpoint.url, timeout=60.0, trust_env=False) as client:
        for n in range(REQUESTS):
            body = {
                "model": ready.endpoint.served_name, "prompt": [1, 2, 3 + n, 4], "max_tokens": 8, "temperature": 0,
                "logprobs": 1, "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    judged = await slot.until(name, State.READY, lambda i: i.start and i.start.cache)
    assert judged.start is not None
    assert judged.start.cache is not None
    return judged.start.cache, judged, answer["choices"][0]["token_ids"]


async def test_a_second_start_loads_what_the_first_compiled_and_compiles_nothing(slot: Slot, tiny_model: Path) -> None:
    cold, first, expected = await _run(slot, tiny_model, "i-1")
    assert first.start is not None
    assert first.start.process.startswith("forked from a zygote (")
    assert cold.verdict == "compiled", cold
    assert cold.compiled > 0
    assert cold.published == ("a",), cold
    slot.change("i-1", Desired.GONE)
    await slot.until("i-1", State.GONE)
    # Nothing of the first is left for the second to find by itself.
    assert not (slot.directory / "state" / "i" / "i-1").exists()
    warm, report, tokens = await _run(slot, tiny_model, "i-2")
    assert warm.key == cold.key
    assert warm.bundle == cold.bundle
    assert (warm.verdict, warm.selected, warm.hit, warm.compiled) == ("hit", True, True, 0), warm
    log = (slot.directory / "state" / "logs" / "i-2.log").read_text()
    assert "Directly load AOT compilation from path" in log
    assert "Compiling model again" not in log
    after = trees.scan(slot.directory / "state" / "i" / "i-2" / "compile", "vllm")
    assert len(after.files) == warm.installed
    assert tokens == expected
    assert warm.saved_seconds is not None
    assert warm.saved_seconds > 0
    slot.change("i-2", Desired.GONE)
    shapes = (await slot.until("i-2", State.GONE)).shapes
    assert shapes is not None
    # Its own canary is not among them, and decoding makes steps of one token.
    assert shapes.prompts == pytest.approx({4: REQUESTS}, rel=0.02)
    assert shapes.steps == pytest.approx({1: 7 * REQUESTS, 4: REQUESTS}, rel=0.02)
    lazy, report, tokens = await _run(slot, tiny_model, "i-3", Mode.LAZY, shapes)
    assert (lazy.verdict, lazy.compiled) == ("hit", 0), lazy
    assert tokens == expected
    assert report.start is not None
    # Of its model, if that was read by now: the test does not wait for it.
    assert report.start.process.startswith("forked from a zygote")
    assert [p.name for p in report.start.phases][:3] == ["dispatch", "cache", "process"]
    warmed = next(p for p in report.start.phases if p.name == "warm_up")
    assert warmed.detail == "2 of 2 requests, prompts of up to 4 tokens"
    print(f"cold {cold}; warm {warm}; lazy {lazy}; phases {report.start.phases}")
