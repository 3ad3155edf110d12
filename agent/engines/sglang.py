"""SGLang: its command line and environment. The handle on a running server is in sglang_handle.py.

Modes: `guardian` is a sleep by its memory saver, `normal` and `lazy` are starts with what others have compiled (it
captures no graph late), `cold` is one without. No zygote: its server forces `spawn`, so a fork would save nothing but
its launcher's imports.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relight.agent.cache import trees
from relight.agent.cache.key import EngineStart
from relight.agent.devices.base import Device
from relight.agent.engines import arguments, kept, sglang_handle, visible
from relight.agent.engines.base import EngineCommand, MemberContext, ZygoteCommand
from relight.agent.engines.sglang_handle import SglangHandle
from relight.agent.surroundings import Surroundings
from relight.core.clock import SystemClock
from relight.core.errors import FieldError, InvalidInput, RelightError
from relight.core.logs import get_logger
from relight.core.records import ModelSpec

log = get_logger("agent.sglang")

OWN_ARGUMENTS = (
    "--model-path", "--model", "--host", "--port", "--served-model-name", "--config", "--admin-api-key", "--api-key",
    "--enable-memory-saver", "--enable-weights-cpu-backup", "--weight-version", "--tp-size", "--tensor-parallel-size",
    "--ep-size", "--expert-parallel-size", "--ep", "--dp-size", "--data-parallel-size", "--nnodes",
    "--base-gpu-id", "--skip-server-warmup", "--engine-info-bootstrap-port",
)  # fmt: skip
"""Arguments that decide how Relight reaches or divides the engine, or what it does with its memory."""
CLASHING: Mapping[str, str] = {
    # It falls back to reading the checkpoint without a word when it cannot do this, and the memory saver is one reason.
    "--load-format": "no --load-format: it is loaded from its directory at each start and wake",
    "--remote-instance": "no loading from a running instance: it takes no key, and control routes here need one",
    "--weight-cache-mode": "no weight cache: its memory cannot be released",
    "--startup-weight-load-mode": "no overlapped loading: it does not go with the memory saver",
    "--speculative": "no speculative decoding: what a draft model keeps over a release is not known",
    "--enable-lora": "no adapters: where they lie in memory is given back by a sleep",
    "--lora-paths": "no adapters: where they lie in memory is given back by a sleep",
}
"""Beginnings of arguments that do not go with a release of memory, and why."""
OWN_ENVIRONMENT = (
    "HOME", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_MEMORY_SAVER_CUDA_GRAPH", *visible.ALL,
    *trees.environment("sglang", Path("/")),
)  # fmt: skip
_ALWAYS = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # Whoever asks for it by habit shall not run a token on memory that is gone.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
}
NO_SLEEP = frozenset({"kunlun"})
"""Kinds of devices on which there is no memory saver, as far as anybody has published."""


class SglangDriver:
    """Starts `python -m sglang.launch_server` of one engine environment."""

    name = "sglang"
    no_zygote = "sglang forces its processes to be spawned: a fork would save nothing but its launcher's imports"

    def __init__(
        self, devices: tuple[Device, ...], surroundings: Surroundings, python: str, zygote: bool = True
    ) -> None:
        """`python` is the interpreter of the engine's environment; `zygote` is for engines that can be forked.

        Raises InvalidInput when there is none, as far as that can be seen from here.
        """
        self._devices, self._surroundings, self._python = {d.id: d for d in devices}, surroundings, python
        if surroundings.here and not Path(python).is_file():
            raise InvalidInput("no engine environment", [FieldError("engines.sglang.python", "an interpreter", python)])
        self._clock = SystemClock()
        self._seen: Mapping[str, Mapping[str, str]] = {}

    async def version(self) -> str | None:
        try:
            return (await self._environment_seen())["versions"].get("sglang")
        except RelightError as error:
            log.warning("sglang.version", reason=str(error))
            return None

    async def _environment_seen(self) -> Mapping[str, Mapping[str, str]]:
        """Asked once: an environment that changes under its engines takes a new agent."""
        if not self._seen:
            self._seen = await self._surroundings.ask(self._python, {"environment": True})
        return self._seen

    def zygote(self, directory: Path) -> ZygoteCommand | None:
        return None

    async def command(self, context: MemberContext) -> EngineCommand:
        spec, assignment = context.assignment.spec, context.assignment
        devices = self._own(context)
        sleeps = not any(device.kind in NO_SLEEP for device in devices)
        _check(spec, sleeps)
        files = (await self._surroundings.ask(self._python, {"model": spec.uri}))["model"]
        if "config.json" not in files:
            raise InvalidInput("bad model", [FieldError("uri", "a directory with config.json", spec.uri)])
        facts = {
            "host": context.bind_host, "port": _free_port(context.bind_host), "sleeps": sleeps,
            "backup": sleeps and spec.guardians.level == 1,
        }  # fmt: skip
        sglang_handle.begun(context.directory, facts)
        kept.KeptFile.begin(context.directory)
        argv = (
            self._python, "-m", "sglang.launch_server", "--config", str(sglang_handle.new_key(context.directory)),
            "--model-path", spec.uri, *spec.args, *_divided(spec), *_memory(facts),
            "--weight-version", assignment.content_revision or spec.revision, "--served-model-name", _served(spec),
            "--host", context.bind_host, "--port", str(facts["port"]),
        )  # fmt: skip
        return EngineCommand(argv, self._environment(context, devices), context.directory, files)

    async def compile_start(self, context: MemberContext, command: EngineCommand) -> EngineStart | None:
        spec = context.assignment.spec
        seen = await self._environment_seen()
        ranks = "0" if spec.devices_per_member == 1 else f"0-{spec.devices_per_member - 1}"
        said = (*spec.args, *_divided(spec))
        return EngineStart(
            self.name, spec.uri, said, command.env, seen["versions"], seen["sources"], seen["code"],
            visible.compiled_for(self._own(context), seen["device"]), command.model_files, ranks,
        )  # fmt: skip

    def _own(self, context: MemberContext) -> list[Device]:
        return [self._devices[d] for d in context.assignment.devices if d in self._devices]

    def _environment(self, context: MemberContext, devices: list[Device]) -> dict[str, str]:
        home = context.directory / "home"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {
            **self._surroundings.variables,
            **_ALWAYS,
            **context.assignment.spec.env,
            **visible.environment(devices),
            "HOME": str(home),
            # Nothing is compiled into a directory that two engines share.
            **trees.environment(self.name, context.compile_root),
        }

    def handle(self, context: MemberContext) -> SglangHandle:
        return SglangHandle(context, self._clock, _served(context.assignment.spec))


def _check(spec: ModelSpec, sleeps: bool) -> None:
    wrong = [
        # Its value may be a key, and what was refused is told to many.
        FieldError("args", f"no {name}: Relight sets it", argument.partition("=")[0])
        for argument in spec.args
        if (name := arguments.own(argument, OWN_ARGUMENTS))
    ]
    wrong += [
        FieldError("args", why, argument)
        for argument in spec.args
        for start, why in CLASHING.items()
        if argument.startswith(start) or arguments.own(argument, (start,))
    ]
    wrong += [FieldError("env", f"no {n}: Relight sets it", spec.env[n]) for n in spec.env if n in OWN_ENVIRONMENT]
    wrong += [FieldError("env", "no RELIGHT_: they are Relight's own", n) for n in spec.env if n.startswith("RELIGHT_")]
    if "expandable_segments:True" in spec.env.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        why = "no expandable_segments: the memory saver cannot map them"
        wrong.append(FieldError("env.PYTORCH_CUDA_ALLOC_CONF", why, spec.env["PYTORCH_CUDA_ALLOC_CONF"]))
    if spec.members != 1:
        wrong.append(FieldError("members", "1 for sglang", str(spec.members)))
    if spec.adapters:
        wrong.append(FieldError("adapters", CLASHING["--enable-lora"], ", ".join(spec.adapter_names)))
    if spec.guardians.replicas and not sleeps:
        expected = f"0: sglang has no memory saver on {' or '.join(sorted(NO_SLEEP))}, so nothing of it can sleep"
        wrong.append(FieldError("guardians.replicas", expected, str(spec.guardians.replicas)))
    if wrong:
        raise InvalidInput("the model does not go with sglang as Relight runs it", wrong)


def _divided(spec: ModelSpec) -> tuple[str, ...]:
    """Arguments that spread the engine over its devices, a rank on each."""
    if spec.devices_per_member == 1:
        return ()
    ranks = ("--tp-size", str(spec.devices_per_member))
    return (*ranks, "--ep-size", str(spec.devices_per_member)) if spec.expert_parallel else ranks


def _memory(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What decides for the whole life of the process whether it can sleep, and at which level."""
    if not facts["sleeps"]:
        return ()
    return ("--enable-memory-saver", *(("--enable-weights-cpu-backup",) if facts["backup"] else ()))


def _served(spec: ModelSpec) -> str:
    return spec.served_names[0] if spec.served_names else spec.name


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
