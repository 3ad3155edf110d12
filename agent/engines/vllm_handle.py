"""The handle on a running `vllm serve` with the plugin in its workers: health, weights, sleep, wake and proof.

It speaks to vLLM's own HTTP and, for what vLLM has no call for, to the plugin (vllm_control.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from relight.agent.engines.base import (
    EngineFacts,
    Health,
    MemberContext,
    Progress,
    Proof,
    ProofFailed,
    Refill,
)
from relight.agent.engines.vllm_ranks import Ranks, by_name, offer, refill_arguments, refilled
from relight.core.clock import Clock
from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.ids import new_id
from relight.core.logs import get_logger
from relight.core.records import Endpoint, InstanceAssignment, Mode, OnTimeout, Phase, Rung, Shapes, SourceOffer
from relight.core.shapes import OWN_REQUEST
from relight.transfer.grants import new_key

log = get_logger("agent.vllm")

CANARY_PROMPT = (1, 17, 5, 99, 42, 7, 250, 3)
"""Token ids that every vocabulary has; what they mean does not matter, only that the answer is repeatable."""
WARM_UP_TOKENS = 4
"""That a warm-up request generates: a prompt's step and a few of decoding."""
VOCABULARY = range(3, 251)
"""Token ids that warm-up prompts are made of."""
CALL_DEADLINE = 30.0
FIRST_GENERATION_DEADLINE = 180.0
"""Seconds: the first request with log-probabilities compiles the sampler."""
STALL_SECONDS = 30.0
"""A step that takes longer than this, with requests running, counts as a hung engine."""

_STAGES = (
    (re.compile(r"Warming up model"), "compiling and warming up"),
    (re.compile(r"Loading weights took|Loading safetensors"), "loading weights"),
    (re.compile(r"Starting to load model"), "building the model"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine core"),
)
_METRIC = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? ([-+.\deEinfNa]+)$", re.MULTILINE)


def served_name(context: MemberContext) -> str:
    """The one name that the engine itself answers to; the gateway maps all others to it."""
    spec = context.assignment.spec
    return spec.served_names[0] if spec.served_names else spec.name


def endpoint_file(directory: Path) -> Path:
    """Where the driver writes the engine's own address down for whoever attaches to it later."""
    return directory / "endpoint.json"


class VllmHandle:
    """One running `vllm serve` with the plugin in its worker."""

    def __init__(self, context: MemberContext, clock: Clock) -> None:
        self._context, self._clock = context, clock
        where = json.loads(endpoint_file(context.directory).read_text())
        host = f"[{where['host']}]" if ":" in where["host"] else where["host"]
        self._url = f"http://{host}:{where['port']}"
        self._name = served_name(context)
        self._ranks = Ranks(context.directory, context.assignment.spec.devices_per_member)
        self._http = httpx.AsyncClient(base_url=self._url, timeout=CALL_DEADLINE, trust_env=False)
        self._canary: dict[str, Any] | None = None
        self._abort = False
        self._progressed: tuple[float, float] = (-1.0, 0.0)

    def follow(self, assignment: InstanceAssignment) -> None:
        if assignment != self._context.assignment:
            self._context = replace(self._context, assignment=assignment)

    async def wait_empty(self, deadline_seconds: float, progress: Progress) -> bool:
        if self._context.assignment.mode is Mode.COLD:
            return False
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    try:
                        said = await self._ranks.all("describe", CALL_DEADLINE)
                        return any(s["state"] != "awake" for s in said)
                    except LocalFault:
                        progress(await asyncio.to_thread(_stage, self._context.log_path))
                    # As in wait_ready.
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise LocalFault(f"vllm had no room for weights after {deadline_seconds:.0f} s; see its log") from error

    async def wait_ready(self, deadline_seconds: float, progress: Progress) -> None:
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    try:
                        if (await self._http.get("/health", timeout=2.0)).status_code == 200:
                            return
                    except httpx.TransportError:
                        progress(await asyncio.to_thread(_stage, self._context.log_path))
                    # vLLM tells nobody when it is up: its port is asked until it answers.
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise LocalFault(f"vllm was not healthy after {deadline_seconds:.0f} s; see its log") from error

    async def describe(self) -> EngineFacts:
        said = await self._ranks.all("describe", CALL_DEADLINE)
        return EngineFacts(
            Fingerprint(**said[0]["fingerprint"]),
            Endpoint(self._url, self._name),
            sum(int(s["weight_bytes"]) for s in said),
            sum(int(s["kv_bytes"]) for s in said),
            by_name(said),
        )

    async def prove_or_record(self) -> tuple[Proof | None, Phase]:
        if self._canary is None:
            self._canary = await self._ranks.first("canary", CALL_DEADLINE)
        if self._canary is not None:
            return await self.prove()
        begun = self._clock.now()
        await self._record_canary()
        return None, Phase("canary", begun, self._clock.now(), "recorded for those who copy from here")

    async def warm_up(self, prompt_tokens: int) -> None:
        most = int((await self.describe()).fingerprint.runtime.get("max_model_len", prompt_tokens)) - WARM_UP_TOKENS
        prompt = [VOCABULARY[n % len(VOCABULARY)] for n in range(max(min(prompt_tokens, most), 1))]
        # Under a salt of its own nobody shares its blocks: not a user's prompt, not the next warm-up, and no canary.
        await self._complete(prompt, CALL_DEADLINE, max_tokens=WARM_UP_TOKENS, cache_salt=new_id("salt"))

    async def shapes(self) -> Shapes:
        said = await self._ranks.first("shapes", CALL_DEADLINE)
        steps, prompts = ({int(k): float(v) for k, v in said[name].items()} for name in ("steps", "prompts"))
        return Shapes(self._clock.now(), steps, prompts)

    async def complete(self) -> int:
        left = await self._post("/collective_rpc", {}, {"method": "relight_complete"}, FIRST_GENERATION_DEADLINE)
        return max((int(n) for n in left["results"]), default=0)

    async def open_source(self) -> SourceOffer:
        key = new_key()
        return offer(await self._ranks.all("open_source", CALL_DEADLINE, {"key": key}), key)

    async def close_source(self, deadline_seconds: float) -> None:
        arguments: dict[str, object] = {"deadline_seconds": deadline_seconds}
        cut = sum(await self._ranks.all("close_source", deadline_seconds + CALL_DEADLINE, arguments))
        if cut:
            log.warning("source.readers-cut", instance=self._context.assignment.instance, readers=cut)

    async def wait_idle(self, deadline_seconds: float, on_timeout: OnTimeout) -> None:
        self._abort = False
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    metrics = await self._metrics()
                    if not metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            if on_timeout is OnTimeout.WAIT:
                raise LocalFault(f"requests still run after {deadline_seconds:g} s") from error
            self._abort = True

    async def sleep(self, level: int) -> None:
        # `wait` lets a request that slipped in finish: it is answered, never lost.
        mode = "abort" if self._abort else "wait"
        await self._post("/sleep", {"level": str(level), "mode": mode})

    async def refill(
        self, rung: Rung, content_revision: str, progress: Progress, *, checkpoint: Path | None = None,
        share: bool = False,
    ) -> Refill:  # fmt: skip
        if rung.source is None and rung.kind.transport:
            raise LocalFault(f"the rung {rung.kind} came without a source")
        path = str(checkpoint or self._context.assignment.spec.uri)
        told = refill_arguments(rung, content_revision, path, self._ranks.count, share)
        ranks: dict[int, dict[str, Any]] = {}

        def tell(rank: int, said: dict[str, Any]) -> None:
            ranks[rank] = said
            done, total, rate = (sum(r[k] for r in ranks.values()) for k in ("bytes", "total", "bytes_per_second"))
            progress(f"{rung.kind}: {done >> 20} of {total >> 20} MiB, {rate / 1e9:.1f} GB/s")

        said = await self._ranks.all("refill", self._context.assignment.deadline_seconds, told, tell)
        self._canary = said[0]["canary"]
        return refilled(said)

    async def resume(self) -> Phase:
        begun = self._clock.now()
        answer = await self._post("/wake_up", {})
        if answer.get("status") != "awake":
            raise LocalFault(f"vllm is not fully awake: {answer}")
        return Phase("kv", begun, self._clock.now(), "KV cache pages on first use; scheduling resumed")

    async def prove(self) -> tuple[Proof, Phase]:
        begun = self._clock.now()
        want = self._canary or await self._ranks.first("canary", CALL_DEADLINE)
        if want is None:
            raise ProofFailed("there is no canary for this content: its source recorded none")
        tokens, logprobs = await self._generate(list(want["prompt_token_ids"]), len(want["token_ids"]), CALL_DEADLINE)
        for at, (got, expected) in enumerate(zip(tokens, want["token_ids"], strict=False)):
            if got != expected:
                raise ProofFailed(f"token {at} is {got}, the source's is {expected}")
        if len(tokens) != len(want["token_ids"]):
            raise ProofFailed(f"{len(tokens)} tokens came, the source's canary has {len(want['token_ids'])}")
        largest = max(abs(a - b) for a, b in zip(logprobs, want["logprobs"], strict=True))
        allowed = self._context.assignment.spec.proof.tolerance_nats
        if not largest <= allowed:
            raise ProofFailed(f"log-probabilities differ by {largest:.3f} nats, at most {allowed:g} are allowed")
        phase = Phase("canary", begun, self._clock.now(), f"{len(tokens)} tokens, off by at most {largest:.2g} nats")
        return Proof(len(tokens), largest), phase

    async def suspend(self) -> None:
        said = await self._ranks.all("describe", CALL_DEADLINE)
        if any(s["state"] == "awake" for s in said):
            # Resumed and not proven: whatever it may be doing is cut.
            await self.close_source(0.0)
            await self._post("/sleep", {"level": "2", "mode": "abort"})
        else:
            await self._ranks.all("suspend", CALL_DEADLINE)

    async def health(self) -> Health:
        metrics = await self._metrics()
        running = int(metrics["vllm:num_requests_running"])
        waiting = int(metrics["vllm:num_requests_waiting"])
        tokens = metrics["vllm:generation_tokens_total"] + metrics["vllm:prompt_tokens_total"]
        now = self._clock.monotonic()
        seen, since = self._progressed
        if tokens != seen or not running + waiting:
            self._progressed = (tokens, now)
        elif now - since > STALL_SECONDS:
            return Health(
                False, f"{running} requests run and none got a token for {now - since:.0f} s", running, waiting
            )
        if (await self._http.get("/health")).status_code != 200:
            return Health(False, "vllm says that its engine core is dead", running, waiting)
        return Health(True, "", running, waiting)

    async def resident(self) -> tuple[int, int, int]:
        said = await self._ranks.all("resident", CALL_DEADLINE)
        # The workers map all of their segments, the host copy too: none is without a process.
        return sum(int(s["weight_bytes"]) for s in said), sum(int(s["kv_bytes"]) for s in said), 0

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------ inside

    async def _record_canary(self) -> None:
        count = self._context.assignment.spec.proof.tokens
        tokens, logprobs = await self._generate(list(CANARY_PROMPT), count, FIRST_GENERATION_DEADLINE)
        self._canary = {"prompt_token_ids": list(CANARY_PROMPT), "token_ids": tokens, "logprobs": logprobs}
        await self._ranks.all("set_canary", CALL_DEADLINE, self._canary)

    async def _post(
        self, path: str, parameters: Mapping[str, str], body: object = None, deadline: float = CALL_DEADLINE,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        try:
            answer = await self._http.post(path, params=parameters, json=body, timeout=deadline, headers=headers)
        except httpx.HTTPError as error:
            raise LocalFault(f"vllm did not answer {path}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            raise LocalFault(f"vllm answered {path} with {answer.status_code}: {answer.text[:300]}")
        return answer.json()

    async def _complete(self, prompt: list[int], deadline: float, **options: object) -> Any:
        """A completion of Relight's own, which the engine does not count as traffic."""
        body = {
            "model": self._name, "prompt": prompt, "temperature": 0, "ignore_eos": True, "add_special_tokens": False,
            **options,
        }  # fmt: skip
        named = {"X-Request-Id": new_id(OWN_REQUEST)}
        return await self._post("/v1/completions", {}, body, deadline, named)

    async def _generate(self, prompt: list[int], count: int, deadline: float) -> tuple[list[int], list[float]]:
        answer = await self._complete(prompt, deadline, max_tokens=count, logprobs=1, return_token_ids=True)
        try:
            choice = answer["choices"][0]
            tokens = [int(t) for t in choice["token_ids"]]
            logprobs = [float(v) for v in choice["logprobs"]["token_logprobs"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LocalFault(f"vllm's completion lacks what a canary needs: {error!r}") from error
        if not all(map(math.isfinite, logprobs)):
            raise ProofFailed("the engine's log-probabilities are not finite")
        return tokens, logprobs

    async def _metrics(self) -> dict[str, float]:
        """vLLM's counters, summed over labels. Raises LocalFault when one that is needed is missing."""
        try:
            text = (await self._http.get("/metrics")).text
        except httpx.HTTPError as error:
            raise LocalFault(f"vllm did not answer /metrics: {type(error).__name__} {error}") from error
        found: dict[str, float] = {}
        for name, value in _METRIC.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        needed = (
            "vllm:num_requests_running", "vllm:num_requests_waiting",
            "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
        )  # fmt: skip
        missing = [name for name in needed if name not in found or not math.isfinite(found[name])]
        if missing:
            # A missing number is not zero: nothing may be put to sleep on the strength of it.
            raise LocalFault(f"vllm's metrics lack {', '.join(missing)}")
        return found


def _stage(path: Path) -> str:
    """What the engine's log says that it is doing."""
    try:
        text = path.read_text(errors="replace")[-200_000:]
    except OSError:
        return "process start"
    for pattern, said in _STAGES:
        if pattern.search(text):
            return said
    return "importing"
