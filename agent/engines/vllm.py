"""vLLM: its command line and environment, and those of the zygote that it is forked from.

Control endpoints listen on the bind host, loopback by default. The handle on a running engine is in vllm_handle.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from relight.agent.cache import trees
from relight.agent.cache.key import EngineStart
from relight.agent.devices.base import Device
from relight.agent.engines.base import (
    ROOM,
    EngineCommand,
    MemberContext,
    ZygoteCommand,
)
from relight.agent.engines.vllm_handle import VllmHandle, endpoint_file, served_name
from relight.agent.surroundings import Surroundings
from relight.core.clock import SystemClock
from relight.core.errors import FieldError, InvalidInput, RelightError
from relight.core.logs import get_logger
from relight.core.records import ModelSpec, Shapes
from relight.core.tls import TlsFiles

log = get_logger("agent.vllm")

OWN_ARGUMENTS = (
    "--worker-cls", "--load-format", "--host", "--port", "--uds", "--served-model-name", "--model",
    "--enable-sleep-mode", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size",
    "--enable-expert-parallel", "-ep", "--lora-modules",
)  # fmt: skip
"""Arguments that decide how Relight reaches or divides the engine: it sets them itself."""
BACKEND = "--distributed-executor-backend"
OWN_ENVIRONMENT = ("VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE", "HOME", *trees.environment("vllm", Path("/")))
FAILPOINTS = "RELIGHT_FAILPOINTS"
"""The one variable of Relight's own that a model's environment may carry: for tests of real engines."""

ON_CPU = ("--worker-cls", "relight.plugin.vllm.worker.RelightCPUWorker", "--load-format", "relight")
ON_GPU = ("--worker-cls", "relight.plugin.vllm.gpu_worker.RelightGPUWorker")
"""It loads weights as vLLM does."""
SIZES = "RELIGHT_SIZES"
"""As plugin/settings.py reads it."""

_ALWAYS = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "VLLM_PLUGINS": "relight",
}  # fmt: skip


class VllmDriver:
    """Starts `vllm serve` of one engine environment."""

    name = "vllm"
    no_zygote = ""

    def __init__(
        self, devices: tuple[Device, ...], surroundings: Surroundings, python: str, zygote: bool = True
    ) -> None:
        """`python` is the interpreter of the engine's environment; `zygote` keeps one that has imported it.

        Raises InvalidInput when there is none, as far as that can be seen from here.
        """
        self._devices, self._surroundings = {d.id: d for d in devices}, surroundings
        self._python, self._zygote = python, zygote
        if surroundings.here and not Path(python).is_file():
            raise InvalidInput("no engine environment", [FieldError("engines.vllm.python", "an interpreter", python)])
        self._clock = SystemClock()
        self._seen: Mapping[str, Mapping[str, str]] = {}

    async def version(self) -> str | None:
        try:
            seen = await self._environment_seen()
        except RelightError as error:
            log.warning("vllm.version", reason=str(error))
            return None
        if seen["missing"]:
            told = "; ".join(f"{name}: {why}" for name, why in seen["missing"].items())
            log.warning("vllm.version", reason=f"Relight's part in {self._python} lacks {told}")
            return None
        return seen["versions"].get("vllm")

    async def _environment_seen(self) -> Mapping[str, Mapping[str, str]]:
        """Asked once: an environment that changes under its engines takes a new agent."""
        if not self._seen:
            self._seen = await self._surroundings.ask(self._python, {"environment": True})
        return self._seen

    def zygote(self, directory: Path) -> ZygoteCommand | None:
        if not self._zygote:
            return None
        socket_path = directory / "s"
        argv = (
            self._python, "-m", "relight.plugin.zygote", "--socket", str(socket_path),
            "--preload", "relight.plugin.vllm.preload", "." * ROOM,
        )  # fmt: skip
        env = {
            **self._surroundings.variables,
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

    async def command(self, context: MemberContext) -> EngineCommand:
        spec = context.assignment.spec
        self._check(spec.args, spec.env)
        if spec.members != 1:
            raise InvalidInput("bad model", [FieldError("members", "1 for vllm on the CPU", str(spec.members))])
        files = (await self._surroundings.ask(self._python, {"model": spec.uri}))["model"]
        if "config.json" not in files:
            raise InvalidInput("bad model", [FieldError("uri", "a directory with config.json", spec.uri)])
        port = _free_port(context.bind_host)
        served = served_name(context)
        endpoint_file(context.directory).write_text(json.dumps({"host": context.bind_host, "port": port}))
        arguments = [
            self._python, "-m", "vllm.entrypoints.cli.main", "serve", spec.uri, *spec.args, *_divided(spec),
            *_adapters(spec), "--served-model-name", served, "--host", context.bind_host, "--port", str(port),
            *(ON_CPU if self._on_cpu(context) else ON_GPU),
        ]  # fmt: skip
        return EngineCommand(tuple(arguments), self._environment(context), context.directory, files)

    async def compile_start(self, context: MemberContext, command: EngineCommand) -> EngineStart | None:
        spec = context.assignment.spec
        seen = await self._environment_seen()
        ranks = "0" if spec.devices_per_member == 1 else f"0-{spec.devices_per_member - 1}"
        return EngineStart(
            self.name, spec.uri, command.argv[command.argv.index(spec.uri) + 1 :], command.env, seen["versions"],
            seen["sources"], seen["code"], seen["device"], command.model_files, ranks,
        )  # fmt: skip

    def _environment(self, context: MemberContext) -> dict[str, str]:
        assignment = context.assignment
        cores = sum(len(self._devices[d].cores) for d in assignment.devices if d in self._devices)
        home = context.directory / "home"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {
            **self._surroundings.variables,
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
            **({} if self._on_cpu(context) else _sizes(assignment.shapes)),
            **_tls(context.data_tls),
            **({"RELIGHT_SOURCE_RATE": str(context.source_rate)} if context.source_rate else {}),
            **({"RELIGHT_RDMA": ",".join(context.cards)} if context.cards else {}),
        }

    def _on_cpu(self, context: MemberContext) -> bool:
        return all(self._devices[d].kind == "cpu" for d in context.assignment.devices if d in self._devices)

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


def _divided(spec: ModelSpec) -> tuple[str, ...]:
    """Arguments that spread the engine over its devices, a rank on each."""
    if spec.devices_per_member == 1:
        return ()
    ranks: tuple[str, ...] = ("--tensor-parallel-size", str(spec.devices_per_member))
    if spec.expert_parallel:
        ranks = (*ranks, "--enable-expert-parallel")
    return ranks if any(BACKEND in a for a in spec.args) else (*ranks, BACKEND, "mp")


def _adapters(spec: ModelSpec) -> tuple[str, ...]:
    """Arguments by which the engine loads the model's adapters, all of which it keeps ready to be used."""
    if not spec.adapters:
        return ()
    room = () if any(a.split("=")[0] == "--max-loras" for a in spec.args) else (f"--max-loras={len(spec.adapters)}",)
    modules = (json.dumps({"name": a.name, "path": a.uri}) for a in spec.adapters)
    return ("--enable-lora", *room, "--lora-modules", *modules)


def _tls(files: TlsFiles | None) -> dict[str, str]:
    if files is None:
        return {}
    return {
        "RELIGHT_TLS_CERTIFICATE": str(files.certificate),
        "RELIGHT_TLS_PRIVATE_KEY": str(files.private_key),
        "RELIGHT_TLS_AUTHORITY": str(files.authority),
    }


def _sizes(shapes: Shapes | None) -> dict[str, str]:
    """The fleet's steps, by which an engine orders what it captures late."""
    if shapes is None:
        return {}
    return {SIZES: json.dumps({str(tokens): weight for tokens, weight in shapes.steps.items()})}


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
