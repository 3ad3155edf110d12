"""The stub engine's process: enough of the OpenAI API over TCP, control over a unix socket.

For tests and simulations only.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import subprocess
import sys
import zlib
from collections import Counter as Counts
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from relight.agent.engines.stub_http import CutOff, Request, Response, serve_connection
from relight.agent.engines.stub_settings import StubSettings
from relight.core.clock import Clock, SystemClock
from relight.core.shapes import PROMPTS, bucket
from relight.protos.convert import from_dict

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "jetty", "knoll")


def token(prompt: str, content: str, index: int) -> str:
    """The token that the stub generates at `index`: fixed by prompt and weights alone."""
    return WORDS[zlib.crc32(f"{content}|{prompt}|{index}".encode()) % len(WORDS)]


def _memory(size: int) -> mmap.mmap | None:
    if size <= 0:
        return None
    block = mmap.mmap(-1, size)
    block.write(b"\x01" * size)
    return block


class StubEngine:
    """State of one stub: weights by content name, KV cache, counters."""

    def __init__(
        self, settings: StubSettings, served_name: str, content: str, clock: Clock, awaits: bool = False
    ) -> None:
        self._settings, self._name, self._clock = settings, served_name, clock
        self._content, self._awake = "nothing" if awaits else content, not awaits
        self._weights = None if awaits else _memory(settings.weight_bytes)
        self._kv = _memory(settings.kv_bytes)
        self.filled = asyncio.Event()
        """Set once an engine that awaits its weights got them."""
        self._left = settings.pieces
        self._steps: Counts[int] = Counts()
        self._prompts: Counts[int] = Counts()
        self._warm_ups: list[int] = []
        self._kept: mmap.mmap | None = None
        self._places = asyncio.Semaphore(settings.at_once or 1 << 30)
        self._progress_at = clock.monotonic()
        self.counts = {"started": 0, "finished": 0, "aborted": 0, "running": 0, "asleep": 0, "generation": 0}

    def begin(self) -> None:
        """Serves from now on."""
        self._awake = True

    # ------------------------------------------------------------------ the OpenAI side

    async def public(self, request: Request) -> Response:
        """What the engine's own port answers."""
        if request.path == "/health":
            return Response(200)
        if request.path == "/v1/models":
            return Response(200, {"object": "list", "data": [{"id": self._name, "object": "model"}]})
        if request.path == "/stub/counts":
            return Response(200, {**self.counts, "warm_ups": self._warm_ups})
        if request.method == "POST" and request.path in ("/v1/completions", "/v1/chat/completions"):
            return await self._complete(request)
        return Response(404, {"error": {"message": "no such route"}})

    async def _complete(self, request: Request) -> Response:
        body, chat = request.json(), request.path.endswith("chat/completions")
        if body.get("model") != self._name:
            return Response(404, {"error": {"message": f"model {body.get('model')!r} is not served here"}})
        if not self._awake:
            self.counts["asleep"] += 1
            return Response(500, {"error": {"message": "the engine is asleep"}})
        self.counts["started"] += 1
        if self.counts["started"] <= self._settings.fail_first:
            return Response(500, {"error": {"message": "configured failure"}})
        prompt = json.dumps(body.get("messages")) if chat else str(body.get("prompt"))
        self._prompts[PROMPTS[bucket(PROMPTS, len(prompt.split()))]] += 1
        self._steps[1] += 1
        tokens = self._tokens(prompt, int(body.get("max_tokens") or 16))
        if body.get("stream"):
            return Response(200, stream=self._events(tokens, chat))
        text = " ".join([t async for t in tokens])
        reason = "abort" if self.counts["started"] <= self._settings.give_up_first else "length"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kind = "chat.completion" if chat else "text_completion"
        return Response(200, {"id": "stub-1", "object": kind, "model": self._name, "choices": [choice]})

    async def _tokens(self, prompt: str, count: int) -> AsyncIterator[str]:
        self.counts["running"] += 1
        done = False
        try:
            async with self._places:
                hang = self._settings.hang_after
                if hang is not None and self.counts["finished"] >= hang:
                    await asyncio.Event().wait()
                for index in range(count):
                    if self._settings.token_delay:
                        await asyncio.sleep(self._settings.token_delay)
                    self._progress_at = self._clock.monotonic()
                    yield token(prompt, self._content, index)
            done = True
        finally:
            self.counts["running"] -= 1
            self.counts["finished" if done else "aborted"] += 1
            self._progress_at = self._clock.monotonic()

    async def _events(self, tokens: AsyncIterator[str], chat: bool) -> AsyncIterator[str]:
        sent = 0
        try:
            async for text in tokens:
                if sent == self._settings.cut_after:
                    raise CutOff
                choice: dict[str, Any] = {"index": 0, "finish_reason": None}
                choice |= {"delta": {"content": text + " "}} if chat else {"text": text + " "}
                yield json.dumps({"id": "stub-1", "model": self._name, "choices": [choice]})
                sent += 1
            yield "[DONE]"
        finally:
            await tokens.aclose()  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ the control side

    async def control(self, request: Request) -> Response:
        """What the agent asks over the unix socket."""
        body = request.json()
        match request.path.removeprefix("/control/"):
            case "health":
                stalled = self._clock.monotonic() - self._progress_at
                hung = self.counts["running"] > 0 and stalled > self._settings.stall_seconds
                return Response(200, {"running": self.counts["running"], "hung": hung})
            case "resident":
                sizes = [len(block) if block else 0 for block in (self._weights, self._kv)]
                return Response(200, {"weight_bytes": sizes[0], "kv_bytes": sizes[1]})
            case "canary":
                return Response(200, {"tokens": [token("canary", self._content, i) for i in range(8)]})
            case "source":
                self.counts["generation"] += 1
                return Response(200, {"generation": self.counts["generation"], "content": self._content})
            case "state":
                return Response(200, {"empty": self._weights is None})
            case "warm_up":
                self._warm_ups.append(int(body.get("tokens") or 0))
                return Response(200)
            case "shapes":
                return Response(200, {"steps": self._steps, "prompts": self._prompts})
            case "complete":
                self._left = max(self._left - 1, 0)
                return Response(200, {"left": self._left})
            case "sleep":
                return self._sleep()
            case "refill":
                return await self._refill(str(body["rung"]), str(body["content"]), str(body["checkpoint"]))
            case "resume":
                self._kv, self._awake = self._kv or _memory(self._settings.kv_bytes), True
                return Response(200)
        return Response(404, {"message": "no such control"})

    def _sleep(self) -> Response:
        if self._settings.sleep_error:
            return Response(500, {"fault": "local", "message": self._settings.sleep_error})
        self._awake, self._content = False, "lost"
        for block in (self._weights, self._kv):
            if block is not None:
                block.close()
        self._weights = self._kv = None
        self._kept = self._kept or _memory(self._settings.sleep_keeps_bytes)
        return Response(200)

    async def _refill(self, rung: str, content: str, checkpoint: str) -> Response:
        fault = self._settings.wake_errors.get(rung)
        if fault == "hang":
            await asyncio.Event().wait()
        await asyncio.sleep(self._settings.wake_seconds)
        if fault in ("remote", "local", "dirty"):
            return Response(500, {"fault": fault, "message": f"tensor stub.weight by {rung}: configured"})
        self._weights = self._weights or _memory(self._settings.weight_bytes)
        self._content = "garbage" if fault == "canary" else content
        self.filled.set()
        return Response(200, {"bytes": self._settings.weight_bytes, "read": _read(checkpoint)})


def _read(checkpoint: str) -> list[str]:
    """What the files of a checkpoint's directory hold, for people; nothing without one."""
    files = sorted(Path(checkpoint).iterdir()) if checkpoint else []
    return [f"{len(path.read_bytes())} bytes of {path.name}" for path in files]


def _compile(settings: StubSettings, clock: Clock) -> None:
    """Loads or makes its artefact, in the directories and words of vLLM 0.32.0."""
    begun = clock.monotonic()
    name = hashlib.sha256(settings.compiles.encode()).hexdigest()
    place = Path(os.environ["VLLM_CACHE_ROOT"]) / "torch_compile_cache" / "torch_aot_compile" / name / "rank_0_0"
    path = place / "model"
    if path.exists() and not settings.refuses_artefacts:
        print(f"Directly load AOT compilation from path {path}")
    else:
        if path.exists():
            print(f"Compiling model again due to a load failure from {path}, reason: as it was told")
        place.mkdir(parents=True, exist_ok=True)
        path.write_bytes(settings.compiles.encode() * 1000)
        print(f"saved AOT compiled function to {path}")
    took = clock.monotonic() - begun
    print(f"init engine (profile, create kv cache, warmup model) took {took:.2f} s", flush=True)


async def _run(arguments: argparse.Namespace, settings: StubSettings) -> None:
    await asyncio.sleep(settings.start_seconds)
    if settings.start_error:
        print(settings.start_error, file=sys.stderr, flush=True)
        os._exit(settings.exit_code)
    if settings.compiles:
        _compile(settings, SystemClock())
    if settings.never_ready:
        await asyncio.Event().wait()
    engine = StubEngine(settings, arguments.served_name, arguments.content, SystemClock(), arguments.awaits)
    socket_path = arguments.directory / "control.sock"
    socket_path.unlink(missing_ok=True)
    await asyncio.start_unix_server(lambda r, w: serve_connection(r, w, engine.control), str(socket_path))
    if arguments.awaits:
        await engine.filled.wait()
        engine.begin()
    public = await asyncio.start_server(
        lambda r, w: serve_connection(r, w, engine.public), arguments.host, arguments.port, limit=1 << 20
    )
    port = public.sockets[0].getsockname()[1]
    temporary = arguments.directory / "port.new"
    temporary.write_text(str(port))
    temporary.rename(arguments.directory / "port")
    print(f"stub engine listens on {arguments.host}:{port}", flush=True)
    if settings.run_for is not None:
        await asyncio.sleep(settings.run_for)
        os._exit(settings.exit_code)
    await asyncio.Event().wait()


def main() -> None:
    """Runs until a signal or a configured failure ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--content", default="")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--awaits", action="store_true")
    arguments = parser.parse_args()
    settings = from_dict(json.loads(arguments.settings), StubSettings, "stub settings")
    if settings.child:
        # Not waited for and in its own session: it lives on when this process is killed.
        code = "import signal; signal.pause()"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    asyncio.run(_run(arguments, settings))


if __name__ == "__main__":
    main()
