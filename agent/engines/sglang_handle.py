"""The handle on a running SGLang server: its order of calls, and which of them would kill it.

    sleep   pause (abort first where requests may be cut) -> pause (retract) -> release
    wake    resume weights -> load from disk, or nothing where they were backed up -> checksums
            -> resume the rest -> continue

`retract` is what makes a release safe: it alone holds the scheduler, and a scheduler that is not held dies of a release
while a request runs, and runs requests on memory that is gone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relight.agent.engines.base import MemberContext
from relight.agent.engines.outside import OutsideHandle
from relight.agent.engines.sglang_api import GIB, SglangApi
from relight.core.clock import Clock
from relight.core.errors import LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.ids import new_id
from relight.core.records import Endpoint, Phase
from relight.core.shapes import OWN_REQUEST

LOAD_FORMAT = "auto"
"""By which it loads at the start and whenever it loads again."""
_START, _CONFIG = "start.json", "sglang.yaml"
_KEY = "admin-api-key"


def begun(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes down how a member is started, for whoever attaches to it: `host`, `port`, `backup`, `sleeps`."""
    (directory / _START).write_text(json.dumps(facts))


def new_key(directory: Path) -> Path:
    """A key for the engine's control routes, in a file of arguments: a command line is everybody's to read."""
    path = directory / _CONFIG
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(f"{_KEY}: {secrets.token_hex(32)}\n")
    return path


def _key(directory: Path) -> str:
    return (directory / _CONFIG).read_text().partition(":")[2].strip()


class SglangHandle(OutsideHandle):
    """One member."""

    engine = "sglang"
    tags = ("cuda_graph", "weights", "kv_cache")
    no_peers = (
        "sglang's loading from a running instance takes no key, so it does not reach one whose control routes are "
        "closed, and it fills no engine that sleeps"
    )

    def __init__(self, context: MemberContext, clock: Clock, served_name: str) -> None:
        super().__init__(context, clock)
        self._started = json.loads((context.directory / _START).read_text())
        host = f"[{self._started['host']}]" if ":" in self._started["host"] else self._started["host"]
        self._url, self._served = f"http://{host}:{self._started['port']}", served_name
        self._api = SglangApi(self._url, _key(context.directory))
        self._described: tuple[Fingerprint, int, int] | None = None

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self._url, self._served)

    async def _load(self) -> tuple[int, int, float]:
        return await self._api.loads()

    async def _ready(self) -> bool:
        return await self._api.ready()

    async def _pause(self, *, abort: bool) -> None:
        if abort:
            await self._api.pause("abort")
        await self._api.pause("retract")

    async def _release(self, tags: Sequence[str], level: int) -> None:
        await self._api.release(tags)

    async def _bring_back(self, tags: Sequence[str]) -> None:
        await self._api.bring_back(tags)

    async def _continue(self) -> None:
        await self._api.resume_requests()

    async def _reload(self, path: str, revision: str, deadline: float) -> None:
        await self._api.load_from_disk(path, LOAD_FORMAT, revision, deadline)

    async def _digests(self) -> Mapping[str, str]:
        return await self._api.checksums()

    async def _generate(self, prompt: Sequence[int], count: int, *, apart: bool) -> tuple[list[int], list[float]]:
        # A canary apart as well: its cache shares single tokens, so that a prompt would be computed in part.
        return await self._api.generate(prompt, count, new_id(OWN_REQUEST), new_id("salt"))

    async def _describe(self) -> tuple[Fingerprint, int, int]:
        """Raises LocalFault too when it is not the engine that was asked for: it gives way silently."""
        if self._described is None:
            server, model = await self._api.server(), await self._api.model()
            self._described = self._read(server, model)
        return self._described

    def _read(self, server: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[Fingerprint, int, int]:
        if self._started["sleeps"] and server.get("enable_memory_saver") is not True:
            raise LocalFault("sglang runs without its memory saver: it would sleep and give nothing back")
        if bool(server.get("enable_weights_cpu_backup")) is not bool(self._started["backup"]):
            raise LocalFault("sglang does not back its weights up as it was told")
        if model.get("load_format") != LOAD_FORMAT:
            raise LocalFault(f"sglang loaded its weights by {model.get('load_format')!r} instead of {LOAD_FORMAT!r}")
        try:
            states = server["internal_states"]
            used = [state["memory_usage"] for state in states]
            weights, cache = (sum(float(u[name]) for u in used) for name in ("weight", "kvcache"))
        except (KeyError, TypeError, ValueError) as error:
            raise LocalFault(f"sglang's server_info lacks what is needed: {error!r}") from error
        ranks = self._context.assignment.spec.devices_per_member
        layout = {
            "engine": f"sglang {server.get('version')}",
            "architectures": ",".join(model.get("architectures") or ()),
            "dtype": str(server.get("dtype")),
            "quantization": str(server.get("quantization") or "none"),
            "tensor_parallel": str(server.get("tp_size")),
            "expert_parallel": str(server.get("ep_size")),
        }
        runtime = {
            "context_length": str(server.get("context_length")),
            "backup": str(self._started["backup"]).lower(),
            "attention": str(server.get("attention_backend")),
        }
        sizes = int(weights * GIB) * ranks, int(cache * GIB) * ranks
        return Fingerprint(layout, {}, runtime), *sizes

    def _unfit(self, level: int) -> str:
        if not self._started["sleeps"]:
            return "this sglang was started without its memory saver"
        if (level == 1) is not bool(self._started["backup"]):
            told = "with" if self._started["backup"] else "without"
            return f"sglang was started {told} a host copy of its weights: it cannot sleep at level {level}"
        return ""

    async def resume(self) -> Phase:
        phase = await super().resume()
        if not await self._api.ready():
            raise LocalFault("sglang is not ready after it was told to go on")
        return phase

    async def close(self) -> None:
        await self._api.close()
