"""The routes: who may call them, what they take, what they answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from relight.agent.engines.stub_http import Request, Response

from .scheduler import Scheduler
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .launch_server import Oddities

VERSION = "0.5.23"
HEALTH_CHECK_TIMEOUT = 20.0
GIB = 1 << 30
ADMIN = frozenset(
    {"/pause_generation", "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation",
     "/update_weights_from_disk", "/weights_checker", "/abort_request", "/flush_cache"}
)  # fmt: skip
"""Control routes: behind the admin key where one is set. What remains is open."""


class Server:
    """One server; every call is noted in `double.calls`, one line each."""

    def __init__(
        self, arguments: argparse.Namespace, odd: Oddities, scheduler: Scheduler, tokenizer: Tokenizer
    ) -> None:
        self._arguments, self._odd, self._scheduler, self._tokenizer = arguments, odd, scheduler, tokenizer
        self._calls = Path.cwd() / "double.calls"
        self._weight_version, self._refused = arguments.weight_version or "default", odd.refuses_reload

    async def answer(self, request: Request) -> Response:
        route = urlsplit(request.path).path
        with self._calls.open("a") as file:
            file.write(json.dumps([request.method, route, request.json() if request.body else None]) + "\n")
        if route == self._odd.dies_in:
            self._scheduler.die(f"told to die in {route}")
        if route == self._odd.hangs_in:
            await asyncio.Event().wait()
        key = self._arguments.admin_api_key
        if route in ADMIN and key and request.headers.get("authorization") != f"Bearer {key}":
            return Response(401, {"error": "Unauthorized"})
        match route:
            case "/ready":
                return Response(200 if self._tokenizer.ready else 503)
            case "/health" | "/health_generate":
                return await self._health(route)
            case "/v1/loads":
                return Response(200, {"version": VERSION, "loads": [self._loads()]})
            case "/v1/models":
                return Response(200, {"data": [{"id": self._arguments.served_model_name, "object": "model"}]})
            case "/model_info":
                return Response(200, self._model())
            case "/server_info":
                return Response(200, self._server())
            case "/generate":
                return await self._generate(request.json())
            case "/v1/completions":
                return await self._complete(request.json())
            case _ if route in ADMIN:
                return await self._control(route, request.json())
        return Response(404, {"detail": "Not Found"})

    async def _control(self, route: str, body: Mapping[str, Any]) -> Response:
        match route:
            case "/pause_generation":
                await self._tokenizer.pause(str(body.get("mode", "abort")))
                return Response(200, {"message": "Generation paused successfully.", "status": "ok"})
            case "/continue_generation":
                await self._tokenizer.resume()
                return Response(200, {"message": "Generation continued successfully.", "status": "ok"})
            case "/release_memory_occupation":
                self._scheduler.release(body.get("tags") or ())
                return Response(200)
            case "/resume_memory_occupation":
                try:
                    self._scheduler.resume(body.get("tags") or ())
                except KeyError as error:
                    why = f"KeyError: {error}"
                    asyncio.get_running_loop().call_later(0.05, lambda: self._scheduler.die(why))
                    return Response(500, {"error": {"message": why}})
                return Response(200)
            case "/update_weights_from_disk":
                return self._reload(body)
            case "/weights_checker":
                return self._checksums(str(body.get("action", "checksum")))
            case "/abort_request":
                if body.get("abort_all"):
                    self._scheduler.abort_all()
                return Response(200)
        idle = not self._scheduler.running and (self._scheduler.engine_paused or not self._scheduler.waiting)
        return Response(200 if idle else 400)

    def _reload(self, body: Mapping[str, Any]) -> Response:
        self._refused -= 1
        why = "configured" if self._refused >= 0 else self._scheduler.load(str(body["model_path"]))
        if why:
            return Response(400, {"success": False, "message": why, "num_paused_requests": 0})
        self._weight_version = body.get("weight_version") or self._weight_version
        said = "Succeeded to update model weights."
        return Response(200, {"success": True, "message": said, "num_paused_requests": 0})

    def _checksums(self, action: str) -> Response:
        if action != "checksum":
            return Response(400, {"success": False, "message": f"Unsupported action={action!r}"})
        one = {"checksums": self._scheduler.digests(), "per_gpu_checksum": "", "parallelism_info": []}
        return Response(200, {"success": True, "message": "Success.", "ranks": [one]})

    async def _health(self, route: str) -> Response:
        if self._tokenizer.status == "Starting":
            return Response(503)
        asked = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true").lower()
        if route == "/health" and asked in ("false", "0"):
            return Response(200)
        try:
            async with asyncio.timeout(HEALTH_CHECK_TIMEOUT):
                await self._tokenizer.generate([0], 1)
        except TimeoutError:
            self._tokenizer.status = "UnHealthy"
            return Response(503)
        return Response(200)

    async def _generate(self, body: Mapping[str, Any]) -> Response:
        sampling = body.get("sampling_params") or {}
        count = int(sampling.get("max_new_tokens", 128))
        request = await self._tokenizer.generate(list(body["input_ids"]), count, str(body.get("rid") or ""))
        if request.aborted:
            return Response(200, {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})
        pairs = [[logprob, token, None] for token, logprob in request.out]
        meta = {"id": request.rid, "completion_tokens": len(pairs), "finish_reason": {"type": "length"}}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = pairs
        return Response(200, {"text": " ".join(str(p[1]) for p in pairs), "meta_info": meta})

    async def _complete(self, body: Mapping[str, Any]) -> Response:
        if body.get("model") != self._arguments.served_model_name:
            return Response(404, {"error": {"message": f"no model {body.get('model')!r}"}})
        request = await self._tokenizer.generate(list(str(body["prompt"]).encode()), int(body.get("max_tokens") or 16))
        choice = {"index": 0, "text": " ".join(str(t) for t, _ in request.out)}
        choice["finish_reason"] = "abort" if request.aborted else "length"
        return Response(200, {"object": "text_completion", "model": body["model"], "choices": [choice]})

    def _loads(self) -> dict[str, Any]:
        scheduler = self._scheduler
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return {"timestamp": scheduler.spoke, "dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}

    def _model(self) -> dict[str, Any]:
        return {
            "model_path": self._arguments.model_path, "weight_version": self._weight_version,
            "load_format": self._arguments.load_format, "architectures": ["DoubleForCausalLM"], "is_generation": True,
        }  # fmt: skip

    def _server(self) -> dict[str, Any]:
        sizes = {"weight": self._scheduler.bytes("weights"), "kvcache": self._scheduler.bytes("kv_cache")}
        used = {name: round(size / GIB, 3) for name, size in sizes.items()}
        return {
            **vars(self._arguments),
            "version": VERSION,
            "startup_time": time.time(),
            "internal_states": [{"memory_usage": used, "world_size": self._arguments.tp_size}],
        }
