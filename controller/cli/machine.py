"""The one YAML file of the single-machine mode: strict, and every refusal names the line and what was expected.

Nothing is started before the whole file has passed, plans that cannot come true included.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from relight.controller.config import Endpoint, ModelConfig
from relight.core.errors import FieldError, InvalidInput
from relight.core.ids import is_name
from relight.core.locks import known

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _bytes(value: Any) -> Any:
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            raise ValueError("a size such as 512MiB, 8GiB, or a number of bytes")
        return int(float(found[1]) * _UNITS[found[2]])
    return value


def _id(value: Any) -> Any:
    """An index may be written as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Size = Annotated[int, BeforeValidator(_bytes), Field(gt=0, le=1 << 50)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceEntry(_Strict):
    """Some cores with a memory budget: one device. Without `cores` the system chooses where it runs."""

    id: Annotated[str, Field(min_length=1, max_length=63)]
    cores: tuple[Annotated[int, Field(ge=0, le=4095)], ...] = ()
    memory: Size


class AcceleratorsEntry(_Strict):
    """Accelerators of this machine: which kind, and which of those that are visible."""

    kind: Annotated[str, Field(min_length=1, max_length=63)] = "auto"
    """nvidia, kunlun, or auto for the only kind that the machine shows."""
    visible: tuple[Annotated[str, BeforeValidator(_id), Field(min_length=1, max_length=127)], ...] | None = None
    """Indices, UUIDs, beginnings of UUIDs, MIG ids; without it what CUDA_VISIBLE_DEVICES or XPU_VISIBLE_DEVICES say,
    else all of them."""
    count: Annotated[int, Field(ge=1, le=1024)] | None = None
    """How many there shall be: the agent does not start where it sees more or fewer."""

    def number(self) -> int | None:
        """How many devices that is; None where the driver alone knows."""
        return self.count if self.visible is None else len(self.visible)


class NodeEntry(_Strict):
    """One node: an agent of its own. Several nodes on one machine stand for several machines."""

    name: str
    devices: tuple[DeviceEntry, ...] = ()
    """Cores as devices."""
    accelerators: AcceleratorsEntry | None = None
    """Devices that a driver knows, instead of `devices`."""
    force_tcp: bool = False
    """Behave as if no other node were on this host: weights come over tcp."""
    rdma: Literal["auto", "off"] | tuple[Annotated[str, Field(min_length=1, max_length=63)], ...] = "auto"
    """RDMA cards that weights travel by between hosts: all that the kernel shows, none, or these."""
    source_rate: Size | None = None
    """Bytes per second that receivers together may read from one engine of this node; without it, all that goes."""
    host_memory: Size | None = None
    """Memory that copies of weights may take on this node, beside its devices' (docs/host-tier.md); none without it."""
    ignore_locks: tuple[str, ...] = ()
    """Version locks that do not count on this node, by name (docs/hardware.md)."""
    metrics_port: Port | None = None
    """Where this node's agent serves metrics of its devices, on loopback (docs/metrics.md); nowhere without it."""

    @field_validator("ignore_locks")
    @classmethod
    def _locks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            known(value)
        except InvalidInput as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _named(self) -> NodeEntry:
        if not is_name(self.name):
            raise ValueError("a node is named by lower-case letters, digits, '-' and '.'")
        if bool(self.devices) == (self.accelerators is not None):
            raise ValueError("either devices, which are cores, or accelerators")
        twice = [i for i, n in Counter(d.id for d in self.devices).items() if n > 1]
        if twice:
            raise ValueError(f"device ids of a node must differ; twice: {', '.join(twice)}")
        return self


class PortsEntry(_Strict):
    """Where this machine's components listen, all on loopback."""

    controller: Port = 7400
    fleet: Port = 7401
    gateway: Port = 8400

    @model_validator(mode="after")
    def _apart(self) -> PortsEntry:
        if len({self.controller, self.fleet, self.gateway}) < 3:
            raise ValueError("three different ports")
        return self


class EngineEntry(_Strict):
    """An engine environment: the interpreter that has the engine and relight-engine."""

    python: str
    zygote: bool = True
    """Keep a process that has imported the engine, which lazy and normal starts are forked from (600 MiB per node)."""


class HoldEntry(_Strict):
    """How many requests the gateway holds while no replica is ready, how long, and how fast they then go on."""

    limit: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    seconds: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    release_per_second: Annotated[float, Field(gt=0, le=100_000)] = 50.0


class CompileCacheEntry(_Strict):
    """The compile-cache ring: each node keeps what engines compile, for the next start of the same."""

    enabled: bool = True
    quota: Size = 10 << 30
    """Bytes of bundles that each node keeps, the least recently used collected first."""
    archive: str | None = None
    """A directory of bundles that is asked before the ring; relative paths count from this file."""
    trusted_keys: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()
    """Public keys whose bundles are used besides those of this machine's nodes."""


class MachineConfig(_Strict):
    """The whole file."""

    ports: PortsEntry = PortsEntry()
    engines: dict[str, EngineEntry]
    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1)]
    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    hold: HoldEntry = HoldEntry()
    compile_cache: CompileCacheEntry = CompileCacheEntry()
    data_tls: bool = False
    """Weights and bundles that go over tcp go over TLS; reads over shared memory never leave the host."""
    digests: Annotated[str, Field(pattern="^(xxh3|sha256)$")] = "xxh3"
    """What proves weights: xxh3 finds accidents at the memory's speed; sha256 also what somebody on the way forged."""
    otlp_endpoint: Endpoint = ""
    """Collector of traces (OTLP over HTTP, as http://127.0.0.1:4318) that each finished start is sent to."""
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = "info"


def load(path: Path) -> MachineConfig:
    """The checked configuration, with relative paths resolved against the file's own folder.

    Raises InvalidInput with one error per wrong place, each beginning with `line N`.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidInput(
            "no configuration", [FieldError(str(path), "a readable YAML file", error.strerror or "unreadable")]
        ) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}" if mark else "the file"
        problem = str(getattr(error, "problem", "") or error)
        raise InvalidInput(f"{path} is not YAML", [FieldError(line, "YAML", problem)]) from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} is not a configuration", [FieldError("line 1", "a mapping", type(data).__name__)])
    try:
        config = MachineConfig.model_validate(data)
    except ValidationError as error:
        raise InvalidInput(
            f"{path} is not a valid configuration",
            [
                FieldError(
                    f"line {_line(node, e['loc'])}: {'.'.join(map(str, e['loc'])) or '(file)'}",
                    e["msg"],
                    repr(e["input"])[:60],
                )
                for e in _causes(error)
            ],
        ) from None
    config = _resolved(config, path.resolve().parent)
    wrong = [
        FieldError(f"line {_line(node, where)}: {'.'.join(map(str, where))}", expected, got)
        for where, expected, got in _impossible(config)
    ]
    if wrong:
        raise InvalidInput(f"{path} cannot come true", wrong)
    return config


def _causes(error: ValidationError) -> list[Any]:
    """The errors without those that only say that a list lost the items that are wrong themselves."""
    found = error.errors(include_url=False)
    inner = {e["loc"][:n] for e in found for n in range(len(e["loc"]))}
    return [e for e in found if not (e["type"] == "too_short" and e["loc"] in inner)]


def _line(node: yaml.Node | None, where: tuple[int | str, ...]) -> int:
    """The line of the deepest place on the way to `where` that the file has."""
    line = node.start_mark.line + 1 if node is not None else 1
    for step in where:
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(step):
                    line, found = key.start_mark.line + 1, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = node.value[step]
            line = found.start_mark.line + 1
        if found is None:
            break
        node = found
    return line


def _resolved(config: MachineConfig, base: Path) -> MachineConfig:
    engines = {
        name: entry.model_copy(update={"python": str(base / Path(entry.python).expanduser())})
        for name, entry in config.engines.items()
    }
    models = tuple(m.model_copy(update={"uri": str(base / Path(m.uri).expanduser())}) for m in config.models)
    cache = config.compile_cache
    if cache.archive is not None:
        cache = cache.model_copy(update={"archive": str(base / Path(cache.archive).expanduser())})
    return config.model_copy(update={"engines": engines, "models": models, "compile_cache": cache})


Impossible = tuple[tuple[int | str, ...], str, str]
ENGINES = ("vllm", "sglang")
"""What an agent can drive (agent/engines/registry.py)."""


def _impossible(config: MachineConfig) -> list[Impossible]:
    found: list[Impossible] = []
    for name, entry in config.engines.items():
        if name not in ENGINES:
            found.append((("engines", name), f"an engine ({' or '.join(ENGINES)})", name))
        elif not Path(entry.python).is_file():
            found.append((("engines", name, "python"), "an interpreter; `make setup` makes one", entry.python))
    for what, names in (
        ("nodes", [n.name for n in config.nodes]),
        ("models", [f"{m.namespace}/{m.name}" for m in config.models]),
    ):
        found += [((what, n, "name"), "a name of its own", x) for n, x in enumerate(names) if names.index(x) < n]
    awake = asleep = 0
    for n, model in enumerate(config.models):
        if model.engine not in config.engines:
            known = ", ".join(config.engines)
            found.append((("models", n, "engine"), f"one of the configured engines ({known})", model.engine))
        if not (Path(model.uri) / "config.json").is_file():
            found.append((("models", n, "uri"), "a model directory with config.json", model.uri))
        if model.replicas > model.max_replicas:
            found.append(
                (("models", n, "replicas"), f"at most max_replicas ({model.max_replicas})", str(model.replicas))
            )
        each = model.members * model.devices_per_member
        awake, asleep = awake + model.replicas * each, asleep + model.guardians.replicas * each
    numbers = [node.accelerators.number() if node.accelerators else len(node.devices) for node in config.nodes]
    if None in numbers:
        return found
    there = sum(number or 0 for number in numbers)
    # Guardians may share what no replica has, as many to a device as all models allow.
    shared = min((model.guardians.max_per_device for model in config.models), default=1)
    if awake > there or asleep > (there - awake) * shared:
        expected = f"replicas and guardians for at most {there} device(s), {shared} guardian(s) on each that is free"
        found.append((("models",), expected, f"{awake + asleep} wanted"))
    return found
