"""SGLang's HTTP as far as Relight calls it: one method for each route. What it is held to: tests/engines/contracts.

Nothing here asks `/health`: it generates a token, hangs while the engine is paused, and then counts as a failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from relight.core.errors import LocalFault

CALL_DEADLINE = 30.0
MEMORY_DEADLINE = 120.0
"""Seconds: to release at level 1, pinned memory for a whole copy is allocated first."""
GIB = 1 << 30


class SglangApi:
    """One server. Every call raises LocalFault when it is not answered as it should be."""

    def __init__(self, url: str, admin_key: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, timeout=CALL_DEADLINE, trust_env=False, headers={"Authorization": f"Bearer {admin_key}"}
        )

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------ looks

    async def ready(self) -> bool:
        """Whether it takes requests: started, warmed up, not paused."""
        return (await self._ask("GET", "/ready", deadline=5.0)).status_code == 200

    async def loads(self) -> tuple[int, int, float]:
        """(running, waiting, time of the scheduler's last word): one that goes on speaks all the time, idle or not."""
        said = self._json(await self._ask("GET", "/v1/loads", parameters={"include": "core"}, deadline=5.0))
        try:
            each = said["loads"]
            running = sum(int(one["num_running_reqs"]) for one in each)
            waiting = sum(int(one["num_waiting_reqs"]) for one in each)
            spoke = min(float(one["timestamp"]) for one in each)
        except (KeyError, TypeError, ValueError) as error:
            # A missing number is not zero: nothing may be put to sleep on the strength of it.
            raise LocalFault(f"sglang's loads lack what is needed: {error!r}") from error
        return running, waiting, spoke

    async def model(self) -> Mapping[str, Any]:
        """`load_format` and `weight_version` as they are now, `architectures`."""
        return dict(self._json(await self._ask("GET", "/model_info")))

    async def server(self) -> Mapping[str, Any]:
        """What its arguments were resolved to, by name, its `version`, and its schedulers' `internal_states`."""
        return dict(self._json(await self._ask("GET", "/server_info")))

    async def checksums(self) -> dict[str, str]:
        """Digests of parameters and persistent buffers, by `rank:name`."""
        said = self._json(await self._ask("POST", "/weights_checker", {"action": "checksum"}, deadline=MEMORY_DEADLINE))
        try:
            return {
                f"{rank}:{name}": str(value)
                for rank, one in enumerate(said["ranks"])
                for name, value in one["checksums"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise LocalFault(f"sglang's checksums lack what is needed: {error!r}") from error

    # ------------------------------------------------------------------ changes

    async def pause(self, mode: str) -> None:
        """`abort` cuts what runs and holds the tokenizer alone; `retract` holds the scheduler, and keeps requests."""
        await self._told("/pause_generation", {"mode": mode}, CALL_DEADLINE)

    async def resume_requests(self) -> None:
        """The scheduler and the tokenizer go on."""
        await self._told("/continue_generation", {"torch_empty_cache": True}, CALL_DEADLINE)

    async def release(self, tags: Sequence[str]) -> None:
        """Of a scheduler that is paused: one that is merely idle dies of a request that comes in between."""
        await self._told("/release_memory_occupation", {"tags": list(tags)}, MEMORY_DEADLINE)

    async def bring_back(self, tags: Sequence[str]) -> None:
        """Of tags that are released, each once: the scheduler dies of any other."""
        await self._told("/resume_memory_occupation", {"tags": list(tags)}, MEMORY_DEADLINE)

    async def load_from_disk(self, path: str, load_format: str, version: str, deadline: float) -> None:
        """Replaces the weights in place, by a directory's; the scheduler stays paused."""
        body = {
            "model_path": path, "load_format": load_format, "weight_version": version, "flush_cache": True,
        }  # fmt: skip
        said = await self._told("/update_weights_from_disk", body, deadline)
        if not (isinstance(said, dict) and said.get("success") is True):
            raise LocalFault(f"sglang did not load {path}: {said}")

    async def generate(
        self, prompt: Sequence[int], count: int, request: str, cache: str
    ) -> tuple[list[int], list[float]]:
        """Greedy ids and log-probabilities; prefixes are shared with requests of the same `cache` alone."""
        body = {
            "input_ids": list(prompt), "rid": request, "return_logprob": True,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True},
            "extra_key": cache,
        }  # fmt: skip
        said = self._json(await self._ask("POST", "/generate", body, deadline=MEMORY_DEADLINE))
        try:
            pairs = said["meta_info"]["output_token_logprobs"]
            return [int(p[1]) for p in pairs], [math.nan if p[0] is None else float(p[0]) for p in pairs]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LocalFault(f"sglang's answer lacks what a canary needs: {error!r}") from error

    # ------------------------------------------------------------------ inside

    async def _told(self, route: str, body: Mapping[str, object], deadline: float) -> Any:
        answer = await self._ask("POST", route, body, deadline=deadline)
        return self._json(answer) if answer.content else None

    async def _ask(
        self, method: str, route: str, body: Mapping[str, object] | None = None, *, deadline: float = CALL_DEADLINE,
        parameters: Mapping[str, str] | None = None,
    ) -> httpx.Response:  # fmt: skip
        try:
            return await self._http.request(method, route, json=body, params=parameters, timeout=deadline)
        except httpx.HTTPError as error:
            raise LocalFault(f"sglang did not answer {route}: {type(error).__name__} {error}") from error

    def _json(self, answer: httpx.Response) -> Any:
        if answer.status_code != 200:
            raise LocalFault(f"sglang answered {answer.url.path} with {answer.status_code}: {answer.text[:300]}")
        try:
            return answer.json()
        except ValueError as error:
            raise LocalFault(f"sglang answered {answer.url.path} with no JSON: {answer.text[:100]}") from error
