"""The agent's configuration file: JSON, strict, every wrong key named before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from relight.agent.devices.base import Device
from relight.core.auth import Identity, Role, TokenEntry, Tokens
from relight.core.errors import FieldError, InvalidInput
from relight.core.ids import is_name
from relight.core.tls import TlsFiles

Port = Annotated[int, Field(ge=0, le=65535)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Tls(_Strict):
    """PEM files; both ends of every connection show a certificate of `authority`."""

    certificate: Path
    private_key: Path
    authority: Path

    def files(self) -> TlsFiles:
        """As the shared record."""
        return TlsFiles(self.certificate, self.private_key, self.authority)


class Token(_Strict):
    """A token that may ask this agent for logs, by its SHA-256."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    name: str
    roles: tuple[Role, ...]


class CpuDevice(_Strict):
    """Some cores (empty: left to the system) with a memory budget."""

    id: Annotated[str, Field(min_length=1, max_length=63)]
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    memory_bytes: Annotated[int, Field(gt=0)]


class AgentConfig(_Strict):
    """All settings of one agent. Relative paths are refused: the agent may be started from anywhere."""

    slot: str
    controller_address: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
    """host:port of the controller's gRPC."""
    host: str = "127.0.0.1"
    """Address of the agent's own gRPC (logs)."""
    port: Port = 0
    """0 takes any free port."""
    token: Annotated[str, Field(min_length=1, repr=False)]
    """Sent to the controller as bearer token."""
    tokens: tuple[Token, ...] = ()
    """Who may read logs here (viewer or operator)."""
    tls: Tls | None = None
    state_dir: Path
    """Journals, logs and the instances' private directories; kept over restarts."""
    supervisor_socket: Path | None = None
    """`state_dir`/s/supervisor.sock when absent."""
    bind_host: str = "127.0.0.1"
    """Address that engines and their data sockets listen on."""
    force_tcp: bool = False
    """Behave as if no other slot were on this host."""
    devices: Annotated[tuple[CpuDevice, ...], Field(min_length=1)]
    engines: dict[str, dict[str, Any]]
    """Engine name -> the driver's settings."""
    health_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Between two looks at each ready engine: a hung one is found within a few of them."""
    devices_seconds: Annotated[float, Field(gt=0, le=3600)] = 15.0
    """Between two measurements of the devices while nothing changes; each walks every page table."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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

    @property
    def socket(self) -> Path:
        """Where the supervisor listens."""
        return self.supervisor_socket or self.state_dir / "s" / "supervisor.sock"

    def device_list(self) -> tuple[Device, ...]:
        """The devices as the backend takes them."""
        return tuple(Device(d.id, "cpu", d.id, d.memory_bytes, cores=d.cores) for d in self.devices)

    def known_tokens(self) -> Tokens:
        """Who may call this agent."""
        return Tokens(TokenEntry(t.sha256, Identity(t.name, frozenset(t.roles))) for t in self.tokens)


def load(path: Path) -> AgentConfig:
    """Raises InvalidInput with every wrong field, or when the file cannot be read."""
    try:
        return AgentConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise InvalidInput(
            f"{path} is not a valid agent configuration",
            [
                FieldError(".".join(map(str, e["loc"])) or "(file)", e["msg"], repr(e["input"])[:80])
                for e in error.errors(include_url=False)
                if e["loc"][:1] != ("token",)
            ]
            + [
                FieldError("token", e["msg"], "***")
                for e in error.errors(include_url=False)
                if e["loc"][:1] == ("token",)
            ],
        ) from None
