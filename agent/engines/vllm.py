"""vLLM on the CPU: its command line and environment, and the handle on a running server.

The handle speaks to vLLM's own HTTP (health, sleep, wake, completions) and, for what vLLM has no call for, to the
plugin in its worker process (vllm_control.py). Control endpoints listen on the bind host, loopback by default.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from relight.agent.cache import probe, trees
from relight.agent.cache.key import EngineStart
from relight.agent.devices.base import Device
from relight.agent.engines.base import (
    ROOM,
    EngineCommand,
    EngineFacts,
    Health,
    MemberContext,
    Progress,
    Proof,
    ProofFailed,
    Refill,
    ZygoteCommand,
)
from relight.agent.engines.vllm_ranks import Ranks, by_name, offer, refill_arguments, refilled
from relight.core.clock import Clock, SystemClock
from relight.core.errors import FieldError, InvalidInput, LocalFault
from relight.core.fingerprint import Fingerprint
from relight.core.logs import get_logger
from relight.core.records import Endpoint, Mode, ModelSpec, OnTimeout, Phase, Rung, RungKind, SourceOffer
from relight.core.tls import TlsFiles
from relight.transfer.grants import new_key

log = get_logger("agent.vllm")

OWN_ARGUMENTS = (
    "--worker-cls", "--load-format", "--host", "--port", "--uds", "--served-model-name", "--model",
    "--enable-sleep-mode", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size",
)  # fmt: skip
"""Arguments that decide how Relight reaches or divides the engine: it sets them itself."""
BACKEND = "--distributed-executor-backend"
OWN_ENVIRONMENT = ("VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE", "HOME", *trees.environment("vllm", Path("/")))
FAILPOINTS = "RELIGHT_FAILPOINTS"
"""The one variable of Relight's own that a model's environment may carry: for tests of real engines."""

CANARY_PROMPT = (1, 17, 5, 99, 42, 7, 250, 3)
"""Token ids that every vocabulary has; what they mean does not matter, only that the answer is repeatable."""
CANARY_TOKENS = 1
"""One forward pass reads every weight, writes the prompt into the KV cache, and attends to what the cache then holds
(vLLM's CPU attention reads keys and values from the cache alone, in prefill too)."""
CANARY_TOLERANCE = 0.05
"""Nats. Equal kernels on equal bytes differ by nothing; a lost KV scale or a wrong layer by far more."""
CALL_DEADLINE = 30.0
FIRST_GENERATION_DEADLINE = 180.0
"""Seconds: the first request with log-probabilities compiles the sampler."""
STALL_SECONDS = 30.0
"""A step that takes longer than this, with requests running, counts as a hung engine."""

_ALWAYS = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "VLLM_PLUGINS": "relight",
}  # fmt: skip

_STAGES = (
    (re.compile(r"Warming up model"), "compiling and warming up"),
    (re.compile(r"Loading weights took|Loading safetensors"), "loading weights"),
    (re.compile(r"Starting to load model"), "building the model"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine core"),
)
_METRIC = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? ([-+.\deEinfNa]+)$", re.MULTILINE)


class VllmDriver:
    """Starts `vllm serve` of one engine environment."""

    name = "vllm"

    def __init__(
        self, python: str, devices: tuple[Device, ...] = (), clock: Clock | None = None, zygote: bool = True
    ) -> None:
        """`python` is the interpreter of the engine's environment; `zygote` keeps one that has imported it.

        Raises InvalidInput when there is none.
        """
        self._python, self._zygote = Path(python), zygote
        if not self._python.is_file():
            raise InvalidInput("no engine environment", [FieldError("engines.vllm.python", "an interpreter", python)])
        self._devices = {d.id: d for d in devices}
        self._clock = clock or SystemClock()
        self._version: str | None = None
        self._probing = threading.Lock()
        self._probed: tuple[probe.Environment, Mapping[str, str]] | None = None

    def version(self) -> str | None:
        """Asks the environment once; importing vLLM itself would take seconds."""
        if self._version is None:
            code = "from importlib.metadata import version as v; v('relight-engine'); print(v('vllm'))"
            try:
                done = subprocess.run(
                    [str(self._python), "-c", code], capture_output=True, text=True, timeout=30, check=True
                )
            except (OSError, subprocess.SubprocessError) as error:
                log.warning("vllm.version", reason=str(error))
                return None
            self._version = done.stdout.strip()
        return self._version

    def zygote(self, directory: Path) -> ZygoteCommand | None:
        if not self._zygote:
            return None
        socket_path = directory / "s"
        argv = (
            str(self._python), "-m", "relight.plugin.zygote", "--socket", str(socket_path),
            "--preload", "relight.plugin.vllm.preload", "." * ROOM,
        )  # fmt: skip
        env = {
            **_inherited(),
            **_ALWAYS,
            # One OS thread: libraries that start theirs when they are loaded are told not to.
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
            # vLLM sets these for the children that it spawns, and they are read at import.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
            "HOME": str(directory),
            "VLLM_CACHE_ROOT": str(directory / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
            "RELIGHT_ROOM": "." * ROOM,
        }
        return ZygoteCommand(EngineCommand(argv, env, directory), socket_path)

    def command(self, context: MemberContext) -> EngineCommand:
        spec = context.assignment.spec
        self._check(spec.args, spec.env)
        if spec.members != 1:
            raise InvalidInput("bad model", [FieldError("members", "1 for vllm on the CPU", str(spec.members))])
        if not (Path(spec.uri) / "config.json").is_file():
            raise InvalidInput("bad model", [FieldError("uri", "a directory with config.json", spec.uri)])
        port = _free_port(context.bind_host)
        served = served_name(context)
        _endpoint_file(context.directory).write_text(json.dumps({"host": context.bind_host, "port": port}))
        arguments = [
            str(self._python), "-m", "vllm.entrypoints.cli.main", "serve", spec.uri, *spec.args, *_divided(spec),
            "--served-model-name", served, "--host", context.bind_host, "--port", str(port),
            "--worker-cls", "relight.plugin.vllm.worker.RelightCPUWorker", "--load-format", "relight",
        ]  # fmt: skip
        return EngineCommand(tuple(arguments), self._environment(context), context.directory)

    def compile_start(self, context: MemberContext, command: EngineCommand) -> EngineStart | None:
        spec = context.assignment.spec
        with self._probing:
            if self._probed is None:
                self._probed = probe.environment(str(self._python)), probe.processor()
        found, device = self._probed
        ranks = "0" if spec.devices_per_member == 1 else f"0-{spec.devices_per_member - 1}"
        return EngineStart(
            self.name, spec.uri, command.argv[command.argv.index(spec.uri) + 1 :], command.env, found.versions,
            found.sources, found.code, device, probe.model_files(Path(spec.uri)), ranks,
        )  # fmt: skip

    def _environment(self, context: MemberContext) -> dict[str, str]:
        assignment = context.assignment
        cores = sum(len(self._devices[d].cores) for d in assignment.devices if d in self._devices)
        home = context.directory / "home"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {
            **_inherited(),
            **_ALWAYS,
            "OMP_NUM_THREADS": str(max(cores // max(assignment.spec.devices_per_member, 1), 1)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **assignment.spec.env,
            "HOME": str(home),
            # Nothing is compiled into a directory that two engines share.
            **trees.environment(self.name, context.compile_root),
            "VLLM_PLUGINS": "relight",
            "VLLM_SERVER_DEV_MODE": "1",
            "RELIGHT_ENGINE_DIR": str(context.directory),
            "RELIGHT_BIND_HOST": context.bind_host,
            "RELIGHT_CONTENT_REVISION": assignment.content_revision or assignment.spec.revision,
            "RELIGHT_MODE": assignment.mode,
            "RELIGHT_START_SECONDS": str(assignment.deadline_seconds),
            **_tls(context.data_tls),
            **({"RELIGHT_SOURCE_RATE": str(context.source_rate)} if context.source_rate else {}),
            **({"RELIGHT_RDMA": ",".join(context.cards)} if context.cards else {}),
        }

    @staticmethod
    def _check(arguments: tuple[str, ...], env: Mapping[str, str]) -> None:
        wrong = [
            FieldError("args", f"no {name}: Relight sets it", argument)
            for argument in arguments
            for name in OWN_ARGUMENTS
            if argument == name or argument.startswith(f"{name}=")
        ]
        wrong += [
            FieldError("env", f"no {name}: Relight sets it", env[name])
            for name in env
            if name in OWN_ENVIRONMENT or (name.startswith("RELIGHT_") and name != FAILPOINTS)
        ]
        if wrong:
            raise InvalidInput("the model's arguments collide with Relight's own", wrong)

    def handle(self, context: MemberContext) -> VllmHandle:
        return VllmHandle(context, self._clock)


def _inherited() -> dict[str, str]:
    # The compiler and its tools are found by PATH; nothing else of the agent's environment goes along.
    return {name: os.environ[name] for name in ("PATH", "LANG", "TZ", "TMPDIR") if name in os.environ}


def _divided(spec: ModelSpec) -> tuple[str, ...]:
    """Arguments that spread the engine over its devices, a rank on each."""
    if spec.devices_per_member == 1:
        return ()
    ranks = ("--tensor-parallel-size", str(spec.devices_per_member))
    return ranks if any(BACKEND in a for a in spec.args) else (*ranks, BACKEND, "mp")


def served_name(context: MemberContext) -> str:
    """The one name that the engine itself answers to; the gateway maps all others to it."""
    spec = context.assignment.spec
    return spec.served_names[0] if spec.served_names else spec.name


def _tls(files: TlsFiles | None) -> dict[str, str]:
    if files is None:
        return {}
    return {
        "RELIGHT_TLS_CERTIFICATE": str(files.certificate),
        "RELIGHT_TLS_PRIVATE_KEY": str(files.private_key),
        "RELIGHT_TLS_AUTHORITY": str(files.authority),
    }


def _endpoint_file(directory: Path) -> Path:
    return directory / "endpoint.json"


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class VllmHandle:
    """One running `vllm serve` with the plugin in its worker."""

    def __init__(self, context: MemberContext, clock: Clock) -> None:
        self._context, self._clock = context, clock
        where = json.loads(_endpoint_file(context.directory).read_text())
        host = f"[{where['host']}]" if ":" in where["host"] else where["host"]
        self._url = f"http://{host}:{where['port']}"
        self._name = served_name(context)
        self._ranks = Ranks(context.directory, context.assignment.spec.devices_per_member)
        self._http = httpx.AsyncClient(base_url=self._url, timeout=CALL_DEADLINE, trust_env=False)
        self._canary: dict[str, Any] | None = None
        self._abort = False
        self._progressed: tuple[float, float] = (-1.0, 0.0)

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

    async def refill(self, rung: Rung, content_revision: str, progress: Progress) -> Refill:
        if rung.source is None and rung.kind not in (RungKind.DISK, RungKind.HOST_COPY):
            raise LocalFault(f"the rung {rung.kind} came without a source")
        spec = self._context.assignment.spec
        told = refill_arguments(rung, content_revision, spec.uri, self._ranks.count)
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
        tokens, logprobs = await self._generate(list(want["prompt_token_ids"]), CALL_DEADLINE)
        for at, (got, expected) in enumerate(zip(tokens, want["token_ids"], strict=False)):
            if got != expected:
                raise ProofFailed(f"token {at} is {got}, the source's is {expected}")
        if len(tokens) != len(want["token_ids"]):
            raise ProofFailed(f"{len(tokens)} tokens came, the source's canary has {len(want['token_ids'])}")
        largest = max(abs(a - b) for a, b in zip(logprobs, want["logprobs"], strict=True))
        if not largest <= CANARY_TOLERANCE:
            raise ProofFailed(f"log-probabilities differ by {largest:.3f} nats, at most {CANARY_TOLERANCE} are allowed")
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
        tokens, logprobs = await self._generate(list(CANARY_PROMPT), FIRST_GENERATION_DEADLINE)
        self._canary = {"prompt_token_ids": list(CANARY_PROMPT), "token_ids": tokens, "logprobs": logprobs}
        await self._ranks.all("set_canary", CALL_DEADLINE, self._canary)

    async def _post(
        self, path: str, parameters: Mapping[str, str], body: object = None, deadline: float = CALL_DEADLINE
    ) -> Any:
        try:
            answer = await self._http.post(path, params=parameters, json=body, timeout=deadline)
        except httpx.HTTPError as error:
            raise LocalFault(f"vllm did not answer {path}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            raise LocalFault(f"vllm answered {path} with {answer.status_code}: {answer.text[:300]}")
        return answer.json()

    async def _generate(self, prompt: list[int], deadline: float) -> tuple[list[int], list[float]]:
        body = {
            "model": self._name, "prompt": prompt, "max_tokens": CANARY_TOKENS, "temperature": 0, "logprobs": 1,
            "ignore_eos": True, "return_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        answer = await self._post("/v1/completions", {}, body, deadline)
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
