"""The handle on a running `vllm serve` with the plugin in its workers: health, weights, sleep, wake and proof.

It speaks to vLLM's own HTTP and, for what vLLM has no call for, to the plugin (vllm_control.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from relight.agent.engines import canary
from relight.agent.engines.base import (
    EngineFacts,
    Health,
    MemberContext,
    Progress,
    Proof,
    ProofFailed,
    Refill,
)
from relight.agent.engines.canary import Answer
from relight.agent.engines.vllm_api import CALL_DEADLINE, FIRST_GENERATION_DEADLINE, MEMORY_DEADLINE, VllmApi
from relight.agent.engines.vllm_ranks import Ranks, by_name, offer, refill_arguments, refilled
from relight.core.clock import Clock
from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.logs import get_logger
from relight.core.records import Endpoint, InstanceAssignment, Mode, OnTimeout, Phase, Rung, Shapes, SourceOffer
from relight.transfer.grants import new_key

log = get_logger("agent.vllm")

STALL_SECONDS = 30.0
"""A step that takes longer than this, with requests running, counts as a hung engine."""

_STAGES = (
    (re.compile(r"Warming up model"), "compiling and warming up"),
    (re.compile(r"Loading weights took|Loading safetensors"), "loading weights"),
    (re.compile(r"Starting to load model"), "building the model"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine core"),
)


def served_name(context: MemberContext) -> str:
    """The one name that the engine itself answers to; the gateway maps all others to it."""
    spec = context.assignment.spec
    return spec.served_names[0] if spec.served_names else spec.name


def endpoint_file(directory: Path) -> Path:
    """Where the driver writes the engine's own address down for whoever attaches to it later."""
    return directory / "endpoint.json"


class VllmHandle:
    """One running `vllm serve` with the plugin in its worker. `awaits`: a start but a cold one waits for weights."""

    def __init__(self, context: MemberContext, clock: Clock, *, awaits: bool = True) -> None:
        self._context, self._clock, self._awaits = context, clock, awaits
        where = json.loads(endpoint_file(context.directory).read_text())
        host = f"[{where['host']}]" if ":" in where["host"] else where["host"]
        self._url = f"http://{host}:{where['port']}"
        self._name = served_name(context)
        self._api = VllmApi(self._url, self._name)
        self._ranks = Ranks(context.directory, context.assignment.spec.devices_per_member)
        self._canary: dict[str, Any] | None = None
        self._abort = False
        self._progressed: tuple[float, float] = (-1.0, 0.0)

    def follow(self, assignment: InstanceAssignment) -> None:
        if assignment != self._context.assignment:
            self._context = replace(self._context, assignment=assignment)

    async def wait_empty(self, deadline_seconds: float, progress: Progress) -> bool:
        if not self._awaits or self._context.assignment.mode is Mode.COLD:
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
                        if await self._api.healthy(2.0):
                            return
                    except LocalFault:
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
            {card: str(way) for s in said for card, way in s.get("direct", {}).items()},
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
        most = int((await self.describe()).fingerprint.runtime.get("max_model_len", prompt_tokens))
        await self._api.warm_up(canary.filler(min(prompt_tokens, most - canary.WARM_UP_TOKENS)))

    async def shapes(self) -> Shapes:
        said = await self._ranks.first("shapes", CALL_DEADLINE)
        steps, prompts = ({int(k): float(v) for k, v in said[name].items()} for name in ("steps", "prompts"))
        return Shapes(self._clock.now(), steps, prompts)

    async def complete(self) -> int:
        left = await self._api.rpc("relight_complete", FIRST_GENERATION_DEADLINE)
        return max((int(n) for n in left), default=0)

    async def open_source(self) -> SourceOffer:
        return await self._open("open_source")

    async def open_relay(self) -> SourceOffer:
        return await self._open("open_relay")

    async def _open(self, operation: str) -> SourceOffer:
        key, rate = new_key(), self._context.source_rate
        said = await self._ranks.all(operation, CALL_DEADLINE, {"key": key})
        return offer(said, key, rate and rate * self._ranks.count)

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
                    load = await self._api.load()
                    if not load.running + load.waiting:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            if on_timeout is OnTimeout.WAIT:
                raise LocalFault(f"requests still run after {deadline_seconds:g} s") from error
            self._abort = True

    async def sleep(self, level: int) -> None:
        said = await self._ranks.all("describe", CALL_DEADLINE)
        if why := next((why for s in said if (why := s.get("unfit", ""))), ""):
            raise LocalFault(why)
        # `wait` lets a request that slipped in finish: it is answered, never lost.
        await self._api.sleep(level, "abort" if self._abort else "wait")

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
        if not await self._api.wake_up():
            raise LocalFault("vllm is not fully awake after it was told to wake")
        return Phase("kv", begun, self._clock.now(), "KV cache pages on first use; scheduling resumed")

    async def prove(self) -> tuple[Proof, Phase]:
        begun = self._clock.now()
        want = self._canary or await self._ranks.first("canary", CALL_DEADLINE)
        if want is None:
            raise ProofFailed("there is no canary for this content: its source recorded none")
        known = Answer.of(want)
        tokens, logprobs = await self._api.generate(known.prompt_token_ids, len(known.token_ids), CALL_DEADLINE)
        proof = canary.hold(known, tokens, logprobs, self._context.assignment.spec.proof.tolerance_nats)
        said = f"{proof.tokens} tokens, off by at most {proof.largest_difference:.2g} nats"
        return proof, Phase("canary", begun, self._clock.now(), said)

    async def suspend(self) -> None:
        said = await self._ranks.all("describe", CALL_DEADLINE)
        if any(s["state"] == "awake" for s in said):
            # Resumed and not proven: whatever it may be doing is cut.
            await self.close_source(0.0)
            await self._api.sleep(2, "abort")
            if all(s["state"] == "asleep" for s in await self._ranks.all("describe", CALL_DEADLINE)):
                return
            # Some ranks woke and others did not: vllm counts such an engine as asleep, and puts nothing to sleep.
        await self._ranks.all("suspend", MEMORY_DEADLINE)

    async def health(self) -> Health:
        load = await self._api.load()
        running, waiting, tokens = load.running, load.waiting, load.tokens
        now = self._clock.monotonic()
        seen, since = self._progressed
        if tokens != seen or not running + waiting:
            self._progressed = (tokens, now)
        elif now - since > STALL_SECONDS:
            return Health(
                False, f"{running} requests run and none got a token for {now - since:.0f} s", running, waiting
            )
        if not await self._api.healthy():
            return Health(False, "vllm says that its engine core is dead", running, waiting)
        return Health(True, "", running, waiting)

    async def resident(self) -> tuple[int, int, int]:
        said = await self._ranks.all("resident", CALL_DEADLINE)
        # The workers map all of their segments, the host copy too: none is without a process.
        return sum(int(s["weight_bytes"]) for s in said), sum(int(s["kv_bytes"]) for s in said), 0

    async def close(self) -> None:
        await self._api.close()

    # ------------------------------------------------------------------ inside

    async def _record_canary(self) -> None:
        count = self._context.assignment.spec.proof.tokens
        tokens, logprobs = await self._api.generate(canary.PROMPT, count, FIRST_GENERATION_DEADLINE)
        self._canary = {"prompt_token_ids": list(canary.PROMPT), "token_ids": tokens, "logprobs": logprobs}
        await self._ranks.all("set_canary", CALL_DEADLINE, self._canary)


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
