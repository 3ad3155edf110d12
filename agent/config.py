"""The agent's configuration file: JSON, strict, every wrong key named before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from relight.agent.cache.service import CacheSettings
from relight.agent.devices.base import Device, Wanted
from relight.agent.devices.kinds import AUTO
from relight.agent.hostcopy.keeper import TierSettings
from relight.core.errors import InvalidInput
from relight.core.ids import is_name
from relight.core.locks import known
from relight.core.tls import TlsFiles
from relight.protos import settings
from relight.protos.settings import Attached, Port, Strict
from relight.transfer.verify import Digest


class CpuDevice(Strict):
    """Some cores (empty: left to the system) with a memory budget."""

    id: Annotated[str, Field(min_length=1, max_length=63)]
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    memory_bytes: Annotated[int, Field(gt=0)]


class Accelerators(Strict):
    """Devices that a driver knows: which kind, and which of those that are visible."""

    kind: Annotated[str, Field(min_length=1, max_length=63)] = AUTO
    """`nvidia`, `kunlun`, or another that was added; `auto` for the only kind that the host shows."""
    visible: tuple[Annotated[str, Field(min_length=1, max_length=127)], ...] | None = None
    """Indices, UUIDs, beginnings of UUIDs, MIG ids; absent: what CUDA_VISIBLE_DEVICES or XPU_VISIBLE_DEVICES say, else
    all."""
    count: Annotated[int, Field(ge=1, le=1024)] | None = None
    """How many were allocated: the agent does not start where it sees more or fewer."""


class CompileCacheConfig(Strict):
    """This node's part of the compile-cache ring (docs/compile-cache.md)."""

    enabled: bool = True
    """Whether a cache node runs here, and starts of the modes lazy and normal use the ring."""
    quota_bytes: Annotated[int, Field(gt=0, le=1 << 50)] = 20 << 30
    """Bytes of bundles that are kept here, the least recently used collected first."""
    host: str | None = None
    """Address that the node listens on and is reached at by the others; `bind_host` when absent."""
    port: Port = 0
    """0 takes any free port: the controller tells the others which."""
    directory: Path | None = None
    """Bundles, the node's signing key, the last ring heard; `state_dir`/compile-cache when absent."""
    trusted_keys: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()
    """Public keys whose bundles are used besides those of the fleet's nodes: of archives from elsewhere."""
    archive: Path | None = None
    """A directory of bundles (one that an image brings along) that is asked before the ring."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600)] = 600.0
    """How long a start waits for another one that compiles the same; at most half of the time that it has left."""
    repair_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Between two repairs while the members stay; each change of them is followed by one at once."""

    @field_validator("directory", "archive")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("an absolute path")
        return value

    @field_validator("host")
    @classmethod
    def _reached(cls, value: str | None) -> str | None:
        if value in ("", "0.0.0.0", "::"):  # noqa: S104 - refused, not bound
            raise ValueError("the one address that other nodes reach this one at")
        return value


class HostTierConfig(Strict):
    """Copies of weights that this slot keeps in host memory (docs/host-tier.md)."""

    budget_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    """Bytes that all copies together may take; 0 keeps none."""


class AgentConfig(Attached):
    """All settings of one agent. Relative paths are refused: the agent may be started from anywhere.

    `host` and `port` are those of its own gRPC, where `tokens` of viewers and operators may read logs.
    """

    slot: str
    state_dir: Path
    """Journals, logs and the instances' private directories; kept over restarts."""
    supervisor_socket: Path | None = None
    """`state_dir`/s/supervisor.sock when absent."""
    supervisor_beside: bool = False
    """Another container runs the supervisor: it is waited for, and never started from here."""
    bind_host: str = "127.0.0.1"
    """Address that engines and their data sockets listen on."""
    force_tcp: bool = False
    """Behave as if no other slot were on this host."""
    data_tls: bool = False
    """Weights travel between hosts over TLS alone, under `tls`."""
    rdma: Literal["auto", "off"] | tuple[Annotated[str, Field(min_length=1, max_length=63)], ...] = "auto"
    """Cards that weights are read and served by between hosts: all that the kernel shows, none, or these."""
    digests: Digest = Digest.XXH3
    """What proves weights: xxh3 finds accidents at the memory's speed; sha256 also what somebody on the way forged,
    where what goes to the controller is under `tls`. All agents of a fleet need the same."""
    source_rate: Annotated[int, Field(ge=1)] | None = None
    """Bytes per second that receivers together may read from one engine; without it, all that goes."""
    devices: tuple[CpuDevice, ...] = ()
    """Cores as devices. Neither these nor accelerators on a node without engines: it keeps copies of weights and a part
    of the compile cache for others."""
    accelerators: Accelerators | None = None
    """Devices that a driver knows, instead of `devices`."""
    engines: Annotated[dict[str, dict[str, Any]], Field(default_factory=dict)]
    """Engine name -> the driver's settings."""
    ignore_locks: tuple[str, ...] = ()
    """Version locks (core/locks.toml) that do not count here, by name; each is logged."""
    compile_cache: CompileCacheConfig = CompileCacheConfig()
    host_tier: HostTierConfig = HostTierConfig()
    serving_port: Port | None = None
    """On `bind_host`: answers for whichever engine is ready here (docs/kubernetes.md). Absent: gateways alone route."""
    metrics_port: Port | None = None
    """On `bind_host`: metrics of devices and transitions, in the clear (docs/metrics.md). Absent: none are served."""
    health_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Between two looks at each ready engine: a hung one is found within a few of them."""
    devices_seconds: Annotated[float, Field(gt=0, le=3600)] = 15.0
    """Between two measurements of the devices while nothing changes; each walks every page table."""

    @field_validator("slot")
    @classmethod
    def _named(cls, value: str) -> str:
        if not is_name(value):
            raise ValueError("a slot is named by lower-case letters, digits, '-' and '.', at most 63")
        return value

    @field_validator("ignore_locks")
    @classmethod
    def _locks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            known(value)
        except InvalidInput as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("state_dir", "supervisor_socket")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("an absolute path")
        return value

    @model_validator(mode="after")
    def _secured(self) -> AgentConfig:
        if self.devices and self.accelerators:
            raise ValueError("either devices, which are cores, or accelerators")
        if bool(self.devices or self.accelerators) != bool(self.engines):
            raise ValueError("devices and engines go together: give both, or neither for a node without engines")
        if self.data_tls and self.tls is None:
            raise ValueError("data_tls needs tls: its certificates are those that weights travel under")
        return self

    def weights_tls(self) -> TlsFiles | None:
        """What weights travel under between hosts."""
        return self.tls.files() if self.data_tls and self.tls else None

    def cache_settings(self) -> CacheSettings | None:
        """The compile cache's section with what it takes from others; None where it is off."""
        own = self.compile_cache
        if not own.enabled:
            return None
        return CacheSettings(
            own.directory or self.state_dir / "compile-cache", own.quota_bytes, own.host or self.bind_host, own.port,
            own.trusted_keys, own.archive, own.wait_seconds, own.repair_seconds,
        )  # fmt: skip

    def tier_settings(self) -> TierSettings:
        """The section `host_tier` with what it takes from others."""
        return TierSettings(
            self.state_dir / "h", self.host_tier.budget_bytes, self.bind_host, self.weights_tls(), self.source_rate
        )  # fmt: skip

    @property
    def socket(self) -> Path:
        """Where the supervisor listens."""
        return self.supervisor_socket or self.state_dir / "s" / "supervisor.sock"

    @property
    def reader_socket(self) -> Path:
        """Where devices of the engine's container are asked for (agent/devices/reader.py)."""
        return self.socket.parent / "devices.sock"

    def cards(self) -> tuple[str, ...] | None:
        """Names of RDMA cards; None for all that there are."""
        if isinstance(self.rdma, tuple):
            return self.rdma
        return None if self.rdma == "auto" else ()

    def device_kind(self) -> str:
        """The kind of device that the slot has, or `auto`."""
        return self.accelerators.kind if self.accelerators else "cpu"

    def wanted_devices(self) -> Wanted:
        """Which of them."""
        if self.accelerators is not None:
            return Wanted(self.accelerators.visible, self.accelerators.count)
        return Wanted(listed=tuple(Device(d.id, "cpu", d.id, d.memory_bytes, cores=d.cores) for d in self.devices))


def load(path: Path, told: Mapping[str, Any] | None = None) -> AgentConfig:
    """The file, with what was `told` beside it in its stead.

    Raises InvalidInput with every wrong field, or when the file cannot be read.
    """
    return settings.load(path, AgentConfig, "agent", told)
