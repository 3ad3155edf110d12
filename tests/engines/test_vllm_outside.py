"""What the handle for a vLLM without Relight in it does when its allocator, a neighbour on the device, or a checkpoint
lets it down."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from relight.agent.engines.base import MemberContext, ProofFailed
from relight.agent.engines.kept import KeptFile
from relight.agent.engines.stub_http import Request, Response, serve_connection
from relight.agent.engines.vllm_handle import endpoint_file
from relight.agent.engines.vllm_outside import VllmOutsideHandle
from relight.core.clock import SystemClock
from relight.core.errors import Conflict, LocalFault, ModelDirty
from relight.core.records import Desired, InstanceAssignment, ModelSpec, Rung, RungKind

pytestmark = pytest.mark.engines
DISK, COPY = Rung(RungKind.DISK, "test"), Rung(RungKind.HOST_COPY, "test")
TAGS = {"weights", "kv_cache"}


@dataclass
class Control:
    """vLLM's control routes as its source has them: which tags sleep, and what the weights are."""

    loaded: str = "r1"
    weights: str = "r1"
    level: int = 0
    sleeping: set[str] = field(default_factory=set)
    backup: str = ""
    refuses: dict[str, str] = field(default_factory=dict)
    """Route -> what it fails with."""
    checks: bool = True
    keeps_cache: bool = False
    """It never says that it is awake."""
    asked: list[str] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        url = urlsplit(request.path)
        self.asked.append(url.path)
        if url.path in self.refuses:
            return Response(500, {"error": {"message": self.refuses[url.path]}})
        tags = set(parse_qs(url.query).get("tags", ()))
        match url.path:
            case "/health":
                return Response(200)
            case "/version":
                return Response(200, {"version": "0.33.0"})
            case "/is_sleeping":
                return Response(200, {"is_sleeping": bool(self.sleeping)})
            case "/sleep":
                self.level = int(parse_qs(url.query)["level"][0])
                self.backup = self.weights if self.level == 1 else ""
                self.weights, self.sleeping = "", set(TAGS)
                return Response(200, {"status": "sleeping", "level": self.level})
            case "/wake_up":
                self.sleeping -= tags or TAGS
                if "weights" not in self.sleeping:
                    self.weights = self.weights or self.backup or "garbage"
                awake = not self.sleeping and not self.keeps_cache
                return Response(200, {"status": "awake" if awake else "sleeping"})
            case "/collective_rpc":
                self.weights = self.loaded
                return Response(200, {"results": [None]})
            case "/weight_checker":
                return Response(200, {"checksums": {"w": self.weights}}) if self.checks else Response(404)
            case "/v1/completions":
                token = zlib.crc32(self.weights.encode()) % 248
                choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-0.5]}}
                return Response(200, {"choices": [choice]})
        return Response(404)


@pytest.fixture
def control() -> Control:
    return Control()


@asynccontextmanager
async def handled(control: Control, directory: Path, level: int = 2) -> AsyncIterator[VllmOutsideHandle]:
    """A proven engine that is awake."""
    connections: list[asyncio.Task[None]] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(serve_connection(reader, writer, control.answer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    facts = {"host": "127.0.0.1", "port": server.sockets[0].getsockname()[1], "cache_bytes": 1, "cannot_sleep": ""}
    endpoint_file(directory).write_text(json.dumps(facts))
    spec = ModelSpec("default", "m", "/models/m", "r1", "vllm")
    wanted = InstanceAssignment("i-a", spec.key, spec, 0, 1, ("gpu-0",), Desired.READY, level=level)
    handle = VllmOutsideHandle(MemberContext(wanted, directory, directory / "log", "127.0.0.1"), SystemClock())
    try:
        await handle.prove_or_record()
        yield handle
    finally:
        await handle.close()
        server.close()
        await asyncio.gather(*(t for t in connections if not t.done()), return_exceptions=True)


async def refill(handle: VllmOutsideHandle, rung: Rung = DISK) -> str:
    return (await handle.refill(rung, "r1", lambda said: None)).detail


async def test_a_copy_in_host_memory_comes_back_without_reading_anything(control: Control, tmp_path: Path) -> None:
    async with handled(control, tmp_path, level=1) as handle:
        await handle.sleep(1)
        assert "agree" in await refill(handle, COPY)
        await handle.resume()
        await handle.prove()
        assert "/collective_rpc" not in control.asked


async def test_weights_that_were_not_reloaded_are_found_by_their_digests(control: Control, tmp_path: Path) -> None:
    async with handled(control, tmp_path) as handle:
        await handle.sleep(2)
        control.loaded = "garbage"
        with pytest.raises(ModelDirty, match="w: not what this content was"):
            await refill(handle)


async def test_where_no_digests_are_computed_the_canary_finds_them(control: Control, tmp_path: Path) -> None:
    control.checks = False
    async with handled(control, tmp_path) as handle:
        await handle.sleep(2)
        control.loaded = "garbage"
        await refill(handle)
        await handle.resume()
        with pytest.raises(ProofFailed, match="token 0"):
            await handle.prove()


@pytest.mark.parametrize(
    ("route", "said", "step"),
    [
        ("/sleep", "Memory usage increased after sleeping.", lambda h: h.sleep(2)),
        ("/wake_up", "CUDA out of memory", refill),
    ],
)
async def test_an_engine_whose_memory_call_failed_is_not_used_again(
    control: Control, tmp_path: Path, route: str, said: str, step: Callable[[VllmOutsideHandle], Any]
) -> None:
    async with handled(control, tmp_path) as handle:
        if route != "/sleep":
            await handle.sleep(2)
        control.refuses = {route: said}
        with pytest.raises(LocalFault, match=said):
            await step(handle)
        control.refuses = {}
        # Part of it may be mapped, and part not: the agent ends what cannot be suspended.
        with pytest.raises(LocalFault, match="has to be ended"):
            await handle.suspend()


async def test_ready_means_that_every_tag_is_awake(control: Control, tmp_path: Path) -> None:
    async with handled(control, tmp_path) as handle:
        await handle.sleep(2)
        await refill(handle)
        control.keeps_cache = True
        with pytest.raises(LocalFault, match="asleep after kv_cache came back"):
            await handle.resume()


async def test_it_is_not_refilled_while_it_serves_nor_resumed_before(control: Control, tmp_path: Path) -> None:
    async with handled(control, tmp_path) as handle:
        with pytest.raises(Conflict, match="awake"):
            await refill(handle)
        await handle.sleep(2)
        with pytest.raises(Conflict, match="a refill comes first"):
            await handle.resume()


async def test_what_cannot_be_read_of_an_earlier_agents_notes_counts_as_unknown(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{")
    with pytest.raises(LocalFault, match="has to be ended"):
        KeptFile(tmp_path).known()
