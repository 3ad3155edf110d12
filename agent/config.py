"""The agent's configuration file: JSON, strict, every wrong key named before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from relight.agent.devices.base import Device
from relight.core.ids import is_name
from relight.core.tls import TlsFiles
from relight.protos import settings
from relight.protos.settings import Attached, Strict


class CpuDevice(Strict):
    """Some cores (empty: left to the system) with a memory budget."""

    id: Annotated[str, Field(min_length=1, max_length=63)]
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    memory_bytes: Annotated[int, Field(gt=0)]


class AgentConfig(Attached):
    """All settings of one agent. Relative paths are refused: the agent may be started from anywhere.

    `host` and `port` are those of its own gRPC, where `tokens` of viewers and operators may read logs.
    """

    slot: str
    state_dir: Path
    """Journals, logs and the instances' private directories; kept over restarts."""
    supervisor_socket: Path | None = None
    """`state_dir`/s/supervisor.sock when absent."""
    bind_host: str = "127.0.0.1"
    """Address that engines and their data sockets listen on."""
    force_tcp: bool = False
    """Behave as if no other slot were on this host."""
    data_tls: bool = False
    """Weights travel between hosts over TLS alone, under `tls`."""
    rdma: Literal["auto", "off"] | tuple[Annotated[str, Field(min_length=1, max_length=63)], ...] = "auto"
    """Cards that weights are read and served by between hosts: all that the kernel shows, none, or these."""
    source_rate: Annotated[int, Field(ge=1)] | None = None
    """Bytes per second that receivers together may read from one engine; without it, all that goes."""
    devices: Annotated[tuple[CpuDevice, ...], Field(min_length=1)]
    engines: dict[str, dict[str, Any]]
    """Engine name -> the driver's settings."""
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

    @field_validator("state_dir", "supervisor_socket")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("an absolute path")
        return value

    @model_validator(mode="after")
    def _secured(self) -> AgentConfig:
        if self.data_tls and self.tls is None:
            raise ValueError("data_tls needs tls: its certificates are those that weights travel under")
        return self

    def weights_tls(self) -> TlsFiles | None:
        """What weights travel under between hosts."""
        return self.tls.files() if self.data_tls and self.tls else None

    @property
    def socket(self) -> Path:
        """Where the supervisor listens."""
        return self.supervisor_socket or self.state_dir / "s" / "supervisor.sock"

    def cards(self) -> tuple[str, ...] | None:
        """Names of RDMA cards; None for all that there are."""
        if isinstance(self.rdma, tuple):
            return self.rdma
        return None if self.rdma == "auto" else ()

    def device_list(self) -> tuple[Device, ...]:
        """The devices as the backend takes them."""
        return tuple(Device(d.id, "cpu", d.id, d.memory_bytes, cores=d.cores) for d in self.devices)


def load(path: Path) -> AgentConfig:
    """Raises InvalidInput with every wrong field, or when the file cannot be read."""
    return settings.load(path, AgentConfig, "agent")
