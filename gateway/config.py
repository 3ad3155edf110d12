"""The gateway's configuration file: JSON, strict, every wrong key named before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relight.core.auth import Identity, Role, TokenEntry, Tokens
from relight.core.errors import FieldError, InvalidInput
from relight.core.tls import TlsFiles
from relight.gateway.desk import Limits


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Tls(_Strict):
    """PEM files of one end."""

    certificate: Path
    private_key: Path
    authority: Path

    def files(self) -> TlsFiles:
        """As the shared record."""
        return TlsFiles(self.certificate, self.private_key, self.authority)


class Token(_Strict):
    """A token that may pin requests, by its SHA-256."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    name: str
    roles: tuple[Role, ...]


class Hold(_Strict):
    """What happens to requests while no replica is ready."""

    limit: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Requests held at once, over all models; the next one is answered 429."""
    seconds: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """The longest that one request is held: a cold start fits into it, a forgotten client does not."""
    release_per_second: Annotated[float, Field(gt=0, le=100_000)] = 50.0
    """Held requests that go on each second once a replica is ready: it must not drown in its first second."""

    def limits(self) -> Limits:
        """As the desk takes them."""
        return Limits(self.limit, self.seconds, self.release_per_second)


class GatewayConfig(_Strict):
    """All settings of one gateway."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = "gateway"
    """Unique among the gateways of one controller."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes any free port."""
    controller_address: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
    """host:port of the controller's gRPC."""
    token: Annotated[str, Field(min_length=1, repr=False)]
    """Sent to the controller as bearer token."""
    tokens: tuple[Token, ...] = ()
    """Who may pin requests (operator)."""
    tls: Tls | None = None
    """For the stream to the controller."""
    https: Tls | None = None
    """For clients; `authority` is not asked of them."""
    hold: Hold = Hold()
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 << 20
    max_tries: Annotated[int, Field(ge=1, le=16)] = 4
    """Replicas that one request is sent to before its failure is the answer."""
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """After SIGTERM, for requests that are in flight."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def known_tokens(self) -> Tokens:
        """Who may pin."""
        return Tokens(TokenEntry(t.sha256, Identity(t.name, frozenset(t.roles))) for t in self.tokens)


def load(path: Path) -> GatewayConfig:
    """Raises InvalidInput with every wrong field, or when the file cannot be read."""
    try:
        return GatewayConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise InvalidInput(
            f"{path} is not a valid gateway configuration",
            [
                FieldError(
                    ".".join(map(str, e["loc"])) or "(file)",
                    e["msg"],
                    "***" if e["loc"][:1] == ("token",) else repr(e["input"])[:80],
                )
                for e in error.errors(include_url=False)
            ],
        ) from None
