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
from relight.agent.engines import arguments, visible, vllm_places
from relight.agent.engines.base import ROOM, EngineCommand, EngineHandle, MemberContext, ZygoteCommand
from relight.agent.engines.kept import KeptFile
from relight.agent.engines.vllm_handle import VllmHandle, endpoint_file, served_name
from relight.agent.engines.vllm_outside import VllmOutsideHandle
from relight.agent.engines.vllm_places import Place
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
OWN_ENVIRONMENT = ("VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE", "HOME", *visible.ALL, *trees.environment("vllm", Path("/")))
FAILPOINTS = "RELIGHT_FAILPOINTS"
"""The one variable of Relight's own that a model's environment may carry: for tests of real engines."""

SIZES = "RELIGHT_SIZES"
"""As plugin/settings.py reads it."""

_ALWAYS = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "VLLM_PLUGINS": "relight",
}  # fmt: skip


class VllmDriver:
    """Starts `vllm serve` of one engine environment."""

    name = "vllm"

    def __init__(
        self, devices: tuple[Device, ...], surroundings: Surroundings, python: str, zygote: bool = True
    ) -> None:
        """`python` is the interpreter of the engine's environment; `zygote` keeps one that has imported it.

        Raises InvalidInput when there is none, as far as that can be seen from here.
        """
        self._devices, self._surroundings = {d.id: d for d in devices}, surroundings
        self._python, self._zygote = python, zygote
        self.no_zygote = vllm_places.place(d.kind for d in devices)[1].no_zygote
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
        if not self._zygote or self.no_zygote:
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
        kind, place = self._place(context)
        versions = (await self._environment_seen())["versions"] if kind == "kunlun" else {}
        cannot = vllm_places.sleeps(kind, versions)
        self._check(spec, kind, place, cannot)
        files = (await self._surroundings.ask(self._python, {"model": spec.uri}))["model"]
        if "config.json" not in files:
            raise InvalidInput("bad model", [FieldError("uri", "a directory with config.json", spec.uri)])
        port = _free_port(context.bind_host)
        served = served_name(context)
        facts: dict[str, object] = {"host": context.bind_host, "port": port}
        cache_bytes = _cache_bytes(spec.args) if kind != "cpu" else 0
        if not place.inside:
            facts |= {"cache_bytes": cache_bytes, "cannot_sleep": cannot or _adapters_go(spec)}
            KeptFile.begin(context.directory)
        endpoint_file(context.directory).write_text(json.dumps(facts))
        own = [a for a in place.arguments if not (cannot and a == vllm_places.SLEEP_MODE)]
        argv = [
            self._python, "-m", "vllm.entrypoints.cli.main", "serve", spec.uri, *vllm_places.arranged(kind, spec.args),
            *_divided(spec), *_adapters(spec), "--served-model-name", served, "--host", context.bind_host,
            "--port", str(port), *own,
        ]  # fmt: skip
        return EngineCommand(tuple(argv), self._environment(context, place), context.directory, files)

    async def compile_start(self, context: MemberContext, command: EngineCommand) -> EngineStart | None:
        spec = context.assignment.spec
        if not self._place(context)[1].compiles:
            return None
        seen = await self._environment_seen()
        ranks = "0" if spec.devices_per_member == 1 else f"0-{spec.devices_per_member - 1}"
        return EngineStart(
            self.name, spec.uri, command.argv[command.argv.index(spec.uri) + 1 :], command.env, seen["versions"],
            seen["sources"], seen["code"], visible.compiled_for(self._own(context), seen["device"]),
            command.model_files, ranks,
        )  # fmt: skip

    def _own(self, context: MemberContext) -> list[Device]:
        return [self._devices[d] for d in context.assignment.devices if d in self._devices]

    def _place(self, context: MemberContext) -> tuple[str, Place]:
        return vllm_places.place(device.kind for device in self._own(context))

    def _environment(self, context: MemberContext, place: Place) -> dict[str, str]:
        assignment = context.assignment
        cores = sum(len(device.cores) for device in self._own(context))
        home = context.directory / "home"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        inherited = {k: v for k, v in self._surroundings.variables.items() if k not in place.removed}
        return {
            **inherited,
            **_ALWAYS,
            "OMP_NUM_THREADS": str(max(cores // max(assignment.spec.devices_per_member, 1), 1)),
            **place.environment,
            **assignment.spec.env,
            **visible.environment(self._own(context)),
            "HOME": str(home),
            # Nothing is compiled into a directory that two engines share.
            **trees.environment(self.name, context.compile_root),
            "VLLM_PLUGINS": ",".join(place.plugins),
            "VLLM_SERVER_DEV_MODE": "1",
            "RELIGHT_ENGINE_DIR": str(context.directory),
            "RELIGHT_BIND_HOST": context.bind_host,
            "RELIGHT_CONTENT_REVISION": assignment.content_revision or assignment.spec.revision,
            "RELIGHT_DIGESTS": context.digests,
            "RELIGHT_MODE": assignment.mode,
            "RELIGHT_START_SECONDS": str(assignment.deadline_seconds),
            **(_sizes(assignment.shapes) if place.graphs else {}),
            **_tls(context.data_tls),
            **({"RELIGHT_SOURCE_RATE": str(context.source_rate)} if context.source_rate else {}),
            **({"RELIGHT_RDMA": ",".join(context.cards)} if context.cards else {}),
        }

    @staticmethod
    def _check(spec: ModelSpec, kind: str, place: Place, cannot_sleep: str) -> None:
        wrong = [
            FieldError("args", f"no {name}: Relight sets it", argument)
            for argument in spec.args
            if (name := arguments.own(argument, (*OWN_ARGUMENTS, *place.owned)))
        ]
        wrong += [
            FieldError("env", f"no {name}: Relight sets it", spec.env[name])
            for name in spec.env
            if name in OWN_ENVIRONMENT or (name.startswith("RELIGHT_") and name != FAILPOINTS)
        ]
        wrong += vllm_places.wrong(kind, spec.args)
        if spec.members != 1:
            wrong.append(FieldError("members", "1 for vllm", str(spec.members)))
        never = cannot_sleep or ("" if place.adapters else _adapters_go(spec))
        if spec.guardians.replicas and never:
            wrong.append(FieldError("guardians.replicas", f"0: {never}", str(spec.guardians.replicas)))
        if wrong:
            raise InvalidInput("the model's arguments collide with Relight's own", wrong)

    def handle(self, context: MemberContext) -> EngineHandle:
        _, place = self._place(context)
        if place.inside:
            return VllmHandle(context, self._clock, awaits=place.awaits)
        return VllmOutsideHandle(context, self._clock)


def _cache_bytes(args: tuple[str, ...]) -> int:
    """Raises InvalidInput for what is no number of bytes."""
    given = ""
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name == vllm_places.CACHE_BYTES:
            given = value if equals else next(words, "")
    if not given.isdigit():
        raise InvalidInput("bad model", [FieldError("args", f"{vllm_places.CACHE_BYTES}=BYTES, a number", given)])
    return int(given)


def _adapters_go(spec: ModelSpec) -> str:
    """Why an engine with adapters cannot sleep on a GPU; empty without any."""
    return "its adapters would be gone after a wake" if spec.adapters else ""


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
