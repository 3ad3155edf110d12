"""Driver and handle of the stub engine: a real process whose every failure is a setting. Tests only."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relight.agent.cache import trees
from relight.agent.cache.key import EngineStart
from relight.agent.devices.base import Device
from relight.agent.engines import stub_http, stub_settings
from relight.agent.engines.base import (
    ROOM,
    EngineCommand,
    EngineFacts,
    EngineHandle,
    Health,
    MemberContext,
    Progress,
    Proof,
    ProofFailed,
    Refill,
    ZygoteCommand,
)
from relight.agent.engines.stub_server import token
from relight.agent.surroundings import Surroundings
from relight.core.clock import Clock, SystemClock
from relight.core.errors import LocalFault, ModelDirty, RemoteFault
from relight.core.fingerprint import Fingerprint, digest
from relight.core.records import Endpoint, InstanceAssignment, Mode, OnTimeout, Phase, Rung, Shapes, SourceOffer

VERSION = "1"
_POLL = 0.01


def _served_name(context: MemberContext) -> str:
    # Never what clients ask for, so that a gateway that forgets to rewrite names is found out.
    return f"stub-{context.assignment.spec.name}"


class StubDriver:
    """Each model's `args` say how its stubs behave; with `zygote`, its environment, they are forked from one."""

    name = "stub"
    no_zygote = ""

    def __init__(
        self, devices: Sequence[Device], surroundings: Surroundings, zygote: Mapping[str, str] | None = None
    ) -> None:
        """It is this interpreter's own code, and knows no devices."""
        self._clock, self._zygote = SystemClock(), zygote

    async def version(self) -> str | None:
        return VERSION

    def zygote(self, directory: Path) -> ZygoteCommand | None:
        if self._zygote is None:
            return None
        argv = (
            sys.executable, "-m", "relight.plugin.zygote", "--socket", str(directory / "s"),
            "--preload", "relight.agent.engines.stub_preload", "." * ROOM,
        )  # fmt: skip
        env = {"RELIGHT_ROOM": "." * ROOM, **self._zygote}
        return ZygoteCommand(EngineCommand(argv, env, directory), directory / "s")

    async def command(self, context: MemberContext) -> EngineCommand:
        spec = context.assignment.spec
        argv = (
            sys.executable, "-m", "relight.agent.engines.stub_server",
            "--directory", str(context.directory),
            "--host", context.bind_host,
            "--served-name", _served_name(context),
            "--content", context.assignment.content_revision,
            "--settings", stub_settings.encode(stub_settings.parse(spec.args)),
            *(() if context.assignment.mode is Mode.COLD else ("--awaits",)),
        )  # fmt: skip
        return EngineCommand(argv, {**spec.env, **trees.environment("vllm", context.compile_root)}, context.directory)

    async def compile_start(self, context: MemberContext, command: EngineCommand) -> EngineStart | None:
        spec = context.assignment.spec
        compiles = stub_settings.parse(spec.args).compiles
        if not compiles:
            return None
        # It compiles into vLLM's directories and logs as vLLM does: what judges one judges the other.
        return EngineStart("vllm", spec.uri, (f"--compiles={compiles}",), spec.env, versions={"stub": VERSION})

    def handle(self, context: MemberContext) -> EngineHandle:
        return StubHandle(context, self._clock)


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    # Another process's state: there is no event to wait for.
    while True:
        if await holds():
            return
        await asyncio.sleep(_POLL)


class StubHandle:
    """Talks to one stub process over its control socket; keeps nothing between calls."""

    def __init__(self, context: MemberContext, clock: Clock) -> None:
        self._context, self._clock = context, clock
        self._socket: Path = context.directory / "control.sock"

    def follow(self, assignment: InstanceAssignment) -> None:
        if assignment != self._context.assignment:
            self._context = replace(self._context, assignment=assignment)

    async def _call(self, name: str, **body: Any) -> dict[str, Any]:
        try:
            status, answer = await stub_http.call(self._socket, f"/control/{name}", body)
        except OSError as error:
            raise LocalFault(f"the stub engine does not answer: {error}") from error
        if status == 200:
            return answer
        message = str(answer.get("message"))
        match answer.get("fault"):
            case "remote":
                raise RemoteFault(message)
            case "dirty":
                raise ModelDirty(message, cause=RemoteFault(message))
        raise LocalFault(message)

    async def wait_empty(self, deadline_seconds: float, progress: Progress) -> bool:
        if self._context.assignment.mode is Mode.COLD:
            return False
        try:
            async with asyncio.timeout(deadline_seconds):
                await _until(self._answers)
        except TimeoutError:
            raise LocalFault(f"the engine was not there after {deadline_seconds:g} s") from None
        return bool((await self._call("state"))["empty"])

    async def prove_or_record(self) -> tuple[Proof | None, Phase]:
        return await self.prove()

    async def warm_up(self, prompt_tokens: int) -> None:
        await self._call("warm_up", tokens=prompt_tokens)

    async def shapes(self) -> Shapes:
        found = await self._call("shapes")
        steps, prompts = ({int(k): float(v) for k, v in found[name].items()} for name in ("steps", "prompts"))
        return Shapes(self._clock.now(), steps, prompts)

    async def complete(self) -> int:
        return int((await self._call("complete"))["left"])

    async def wait_ready(self, deadline_seconds: float, progress: Progress) -> None:
        try:
            async with asyncio.timeout(deadline_seconds):
                await _until(self._listens)
        except TimeoutError:
            raise LocalFault(f"the engine was not ready after {deadline_seconds:g} s") from None
        await self._call("health")
        progress("the stub engine answers")

    async def describe(self) -> EngineFacts:
        port = (self._context.directory / "port").read_text()
        sizes = await self._call("resident")
        spec = self._context.assignment.spec
        return EngineFacts(
            Fingerprint(
                layout={"engine": f"stub {VERSION}"},
                content={"revision": self._context.assignment.content_revision},
                runtime={"uri": spec.uri},
            ),
            Endpoint(f"http://{self._context.bind_host}:{port}", _served_name(self._context)),
            sizes["weight_bytes"],
            sizes["kv_bytes"],
        )

    async def _answers(self) -> bool:
        try:
            await self._call("state")
        except LocalFault:
            return False
        return True

    async def _listens(self) -> bool:
        return (self._context.directory / "port").exists()

    async def _idle(self) -> bool:
        return not (await self._call("health"))["running"]

    async def open_source(self) -> SourceOffer:
        found = await self._call("source")
        content = hashlib.sha256(found["content"].encode()).hexdigest()[:32]
        address = f"unix:{self._context.directory / 'data.sock'}"
        layout = digest({"engine": f"stub {VERSION}"})
        sizes = await self._call("resident")
        return SourceOffer(
            found["generation"], content, content, layout, {"shm": address}, sizes["weight_bytes"], grant_key="k"
        )

    async def open_relay(self) -> None:
        """Nothing of it can be read."""
        return

    async def close_source(self, deadline_seconds: float) -> None:
        await self._call("health")

    async def wait_idle(self, deadline_seconds: float, on_timeout: OnTimeout) -> None:
        try:
            async with asyncio.timeout(deadline_seconds):
                await _until(self._idle)
        except TimeoutError:
            if on_timeout is OnTimeout.WAIT:
                raise LocalFault("requests still run") from None

    async def sleep(self, level: int) -> None:
        await self._call("sleep", level=level)

    async def refill(
        self, rung: Rung, content_revision: str, progress: Progress, *, checkpoint: Path | None = None,
        share: bool = False,
    ) -> Refill:  # fmt: skip
        begun = self._clock.now()
        found = await self._call(
            "refill", rung=rung.kind, content=content_revision, checkpoint=str(checkpoint) if checkpoint else ""
        )
        progress(f"refilled by {rung.kind}")
        ended = self._clock.now()
        read = "".join(f", read {name}" for name in found["read"])
        return Refill(found["bytes"], (Phase("pull", begun, ended, rung.kind),), f"{found['bytes']} bytes{read}")

    async def resume(self) -> Phase:
        begun = self._clock.now()
        await self._call("resume")
        return Phase("kv", begun, self._clock.now())

    async def prove(self) -> tuple[Proof, Phase]:
        begun = self._clock.now()
        got = (await self._call("canary"))["tokens"]
        revision = self._context.assignment.content_revision
        wanted = [token("canary", revision, i) for i in range(len(got))]
        for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            if ours != theirs:
                raise ProofFailed(f"token {index} is {ours!r}, the source's is {theirs!r}")
        return Proof(len(got), 0.0), Phase("canary", begun, self._clock.now())

    async def suspend(self) -> None:
        await self._call("sleep", level=self._context.assignment.level)

    async def health(self) -> Health:
        found = await self._call("health")
        reason = "requests run and no token came" if found["hung"] else ""
        return Health(not found["hung"], reason, found["running"])

    async def resident(self) -> tuple[int, int, int]:
        found = await self._call("resident")
        return found["weight_bytes"], found["kv_bytes"], 0

    async def close(self) -> None:
        """Nothing is kept open between calls."""
