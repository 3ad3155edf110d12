"""vLLM's HTTP as far as Relight calls it, control routes included. What it is held to: tests/engines/contracts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from relight.agent.engines import canary
from relight.core.errors import LocalFault
from relight.core.ids import new_id
from relight.core.shapes import OWN_REQUEST

CALL_DEADLINE = 30.0
FIRST_GENERATION_DEADLINE = 180.0
"""Seconds: the first request with log-probabilities compiles the sampler."""
MEMORY_DEADLINE = 120.0
"""Seconds: a sleep at level 1 allocates pinned memory for a whole copy first."""
NEEDED = (
    "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
)  # fmt: skip
_METRIC = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? ([-+.\deEinfNa]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run and that wait, and all tokens so far: they grow while any request makes progress."""

    running: int
    waiting: int
    tokens: float


class VllmApi:
    """One server. Every call raises LocalFault when it is not answered as it should be."""

    def __init__(self, url: str, served_name: str) -> None:
        self._name = served_name
        self._http = httpx.AsyncClient(base_url=url, timeout=CALL_DEADLINE, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------ looks

    async def healthy(self, deadline: float = CALL_DEADLINE) -> bool:
        """Whether its server says that the engine core lives."""
        return (await self._ask("GET", "/health", deadline=deadline)).status_code == 200

    async def version(self) -> str:
        return str(self._json(await self._ask("GET", "/version")).get("version"))

    async def asleep(self) -> bool:
        """True until every tag is resident and scheduling goes on."""
        return bool(self._json(await self._ask("GET", "/is_sleeping")).get("is_sleeping", True))

    async def load(self) -> Load:
        """From its metrics, summed over labels. Raises LocalFault when one that is needed is missing."""
        text = (await self._ask("GET", "/metrics")).text
        found: dict[str, float] = {}
        for name, value in _METRIC.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        missing = [name for name in NEEDED if name not in found or not math.isfinite(found[name])]
        if missing:
            # A missing number is not zero: nothing may be put to sleep on the strength of it.
            raise LocalFault(f"vllm's metrics lack {', '.join(missing)}")
        running, waiting, *tokens = (found[name] for name in NEEDED)
        return Load(int(running), int(waiting), sum(tokens))

    async def checksums(self) -> dict[str, str] | None:
        """Digests of its parameters by name; None from a version that computes none."""
        answer = await self._ask("POST", "/weight_checker", {"action": "checksum"}, deadline=MEMORY_DEADLINE)
        if answer.status_code == 404:
            return None
        said = self._json(answer).get("checksums")
        if not isinstance(said, dict):
            raise LocalFault("vllm's weight checker answered without checksums")
        return {str(name): str(value) for name, value in said.items()}

    # ------------------------------------------------------------------ changes

    async def sleep(self, level: int, mode: str) -> None:
        """Pauses scheduling by `mode` (abort, wait, keep) and gives memory back, of tags that are still there."""
        parameters = {"level": str(level), "mode": mode}
        self._json(await self._ask("POST", "/sleep", parameters=parameters, deadline=MEMORY_DEADLINE))

    async def wake_up(self, tags: Sequence[str] = ()) -> bool:
        """Maps memory of `tags`, or of all, again. Whether it is fully awake, and schedules."""
        said = self._json(await self._ask("POST", "/wake_up", parameters={"tags": list(tags)}))
        return bool(said.get("status") == "awake")

    async def rpc(self, method: str, deadline: float, **arguments: str) -> list[Any]:
        """Calls a method of every worker, between two steps; its results by rank."""
        body = {"method": method, **({"kwargs": arguments} if arguments else {})}
        answer = await self._ask("POST", "/collective_rpc", body, deadline=deadline)
        return list(self._json(answer)["results"]) if answer.content else []

    async def complete(self, prompt: Sequence[int], deadline: float, **options: object) -> Any:
        """A completion of Relight's own, which the engine does not count as traffic."""
        body = {
            "model": self._name, "prompt": list(prompt), "temperature": 0, "ignore_eos": True,
            "add_special_tokens": False, **options,
        }  # fmt: skip
        named = {"X-Request-Id": new_id(OWN_REQUEST)}
        return self._json(await self._ask("POST", "/v1/completions", body, deadline=deadline, headers=named))

    async def warm_up(self, prompt: Sequence[int]) -> None:
        """Under a salt of its own nobody shares its blocks: not a user's prompt, no next warm-up, and no canary."""
        await self.complete(prompt, CALL_DEADLINE, max_tokens=canary.WARM_UP_TOKENS, cache_salt=new_id("salt"))

    async def generate(self, prompt: Sequence[int], count: int, deadline: float) -> tuple[list[int], list[float]]:
        """Greedy ids and their log-probabilities. Raises ProofFailed for log-probabilities that are not finite."""
        answer = await self.complete(prompt, deadline, max_tokens=count, logprobs=1, return_token_ids=True)
        try:
            choice = answer["choices"][0]
            tokens = [int(t) for t in choice["token_ids"]]
            logprobs = [float(v) for v in choice["logprobs"]["token_logprobs"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LocalFault(f"vllm's completion lacks what a canary needs: {error!r}") from error
        canary.finite(logprobs)
        return tokens, logprobs

    # ------------------------------------------------------------------ inside

    async def _ask(
        self, method: str, route: str, body: Mapping[str, object] | None = None, *, deadline: float = CALL_DEADLINE,
        parameters: Mapping[str, str | Sequence[str]] | None = None, headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:  # fmt: skip
        try:
            return await self._http.request(
                method, route, json=body, params=parameters, timeout=deadline, headers=headers
            )  # fmt: skip
        except httpx.HTTPError as error:
            raise LocalFault(f"vllm did not answer {route}: {type(error).__name__} {error}") from error

    def _json(self, answer: httpx.Response) -> Any:
        if answer.status_code != 200:
            raise LocalFault(f"vllm answered {answer.url.path} with {answer.status_code}: {answer.text[:300]}")
        try:
            return answer.json()
        except ValueError as error:
            raise LocalFault(f"vllm answered {answer.url.path} with no JSON: {answer.text[:100]}") from error
