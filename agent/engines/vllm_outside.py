"""The handle on `vllm serve` that no part of Relight is in: on Kunlun, whose own plugin must come first.

    sleep   /sleep, which pauses first: `wait` for what slipped in, `abort` where requests may be cut
    wake    /wake_up of the weights -> reload_weights at level 2 -> checksums -> /wake_up of the rest

vLLM asserts at a sleep that the device's free memory did not shrink meanwhile, at a start that it did not grow: no
other engine of the device may move at the same time, which is reconcile's to see to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from relight.agent.engines.base import MemberContext
from relight.agent.engines.outside import WEIGHTS, OutsideHandle
from relight.agent.engines.vllm_api import FIRST_GENERATION_DEADLINE, VllmApi
from relight.agent.engines.vllm_handle import endpoint_file, served_name
from relight.core.clock import Clock
from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.records import Endpoint


class VllmOutsideHandle(OutsideHandle):
    """One member."""

    engine = "vllm"
    tags = (WEIGHTS, "kv_cache")
    no_peers = "no part of Relight is in vllm there: its weights are read and loaded by vllm alone"

    def __init__(self, context: MemberContext, clock: Clock) -> None:
        super().__init__(context, clock)
        where = json.loads(endpoint_file(context.directory).read_text())
        host = f"[{where['host']}]" if ":" in where["host"] else where["host"]
        self._url, self._cache_bytes = f"http://{host}:{where['port']}", int(where["cache_bytes"])
        self._api = VllmApi(self._url, served_name(context))
        self._cannot_sleep, self._cut = str(where["cannot_sleep"]), False
        self._version = ""

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self._url, served_name(self._context))

    async def _load(self) -> tuple[int, int, float]:
        load = await self._api.load()
        # Nothing has to move in an idle engine.
        return load.running, load.waiting, load.tokens if load.running + load.waiting else self._clock.monotonic()

    async def _ready(self) -> bool:
        return await self._api.healthy(5.0)

    async def _pause(self, *, abort: bool) -> None:
        # It pauses as part of its sleep.
        self._cut = abort

    async def _release(self, tags: Sequence[str], level: int) -> None:
        await self._api.sleep(level, "abort" if self._cut else "wait")

    async def _bring_back(self, tags: Sequence[str]) -> None:
        awake = await self._api.wake_up(tags)
        if awake is (WEIGHTS in tags):
            raise LocalFault(f"vllm says that it is {'awake' if awake else 'asleep'} after {', '.join(tags)} came back")

    async def _reload(self, path: str, revision: str, deadline: float) -> None:
        await self._api.rpc("reload_weights", deadline, weights_path=path)

    async def _continue(self) -> None:
        if await self._api.asleep():
            raise LocalFault("vllm is not fully awake after everything came back")

    async def _digests(self) -> Mapping[str, str]:
        # A version that computes none is proven by its canary alone.
        return await self._api.checksums() or {}

    async def _generate(self, prompt: Sequence[int], count: int, *, apart: bool) -> tuple[list[int], list[float]]:
        if apart:
            await self._api.warm_up(prompt)
            return [], []
        return await self._api.generate(prompt, count, FIRST_GENERATION_DEADLINE)

    async def _describe(self) -> tuple[Fingerprint, int, int]:
        """As much as a server without Relight in its workers says; how large its weights are it does not."""
        self._version = self._version or await self._api.version()
        ranks = self._context.assignment.spec.devices_per_member
        layout = {"engine": f"vllm {self._version}", "tensor_parallel": str(ranks)}
        return Fingerprint(layout, {}, {"kv_cache_bytes": str(self._cache_bytes)}), 0, self._cache_bytes * ranks

    def _unfit(self, level: int) -> str:
        return self._cannot_sleep

    async def close(self) -> None:
        await self._api.close()
