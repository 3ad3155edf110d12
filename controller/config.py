"""The controller's configuration file: JSON, strict, every wrong key named before anything starts."""

from __future__ import annotations

import json
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from relight.controller.specs import ModelBody
from relight.core.auth import Tokens
from relight.core.errors import FieldError, InvalidInput
from relight.core.ids import is_name
from relight.core.records import ModelSpec
from relight.protos.settings import Closed, Port, Tls, Token, known, wrong_fields


class Listen(Closed):
    """Where to listen; port 0 picks a free one. Without TLS only a loopback address is allowed."""

    host: str = "127.0.0.1"
    port: Port
    tls: Tls | None = None

    @model_validator(mode="after")
    def _plaintext_is_loopback(self) -> Listen:
        if self.tls is None and not _is_loopback(self.host):
            raise ValueError(f"without `tls` the host must be a loopback address, not {self.host}")
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class NamedToken(Token):
    """A token whose name stands in the operations that its holder asks for."""

    name: Annotated[str, Field(min_length=1, max_length=64)]


class ModelConfig(ModelBody):
    """A model that is made known at start."""

    namespace: str = "default"
    name: str

    @model_validator(mode="after")
    def _names(self) -> ModelConfig:
        for field in ("namespace", "name"):
            if not is_name(getattr(self, field)):
                raise ValueError(f"{field} must be lower-case letters, digits, '-' and '.'")
        return self

    def record(self) -> ModelSpec:
        """As the shared record."""
        return self.spec(self.namespace, self.name)


Endpoint = Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$", max_length=2048)]
"""The base URL of a collector of traces (OTLP over HTTP, as `http://127.0.0.1:4318`); empty for none."""


class ControllerConfig(Closed):
    """The whole file."""

    state_path: Path
    http: Listen
    grpc: Listen
    tokens: tuple[NamedToken, ...]
    models: tuple[ModelConfig, ...] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    slot_grace_seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 10.0
    """How long a slot whose agent went away counts as alive: longer than an agent takes to restart."""
    gateway_grace_seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 3.0
    """How long a vanished gateway may still be routing, and so holds drains up."""
    event_stream_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 3600.0
    """After how long a stream of events ends at the latest; its reader resumes where it stood."""
    shutdown_grace_seconds: Annotated[float, Field(gt=0, le=300, allow_inf_nan=False)] = 5.0
    agent_token: Annotated[str, Field(repr=False)] = ""
    """Shown to agents when their logs or their compile cache are asked for; agents must know it with the role viewer,
    and operator for the end of a quarantine."""

    otlp_endpoint: Endpoint = ""
    """Where each finished start is sent as a trace; empty sends nothing."""

    def known_tokens(self) -> Tokens:
        """The tokens that are accepted here."""
        return known(self.tokens)


def load(path: Path) -> ControllerConfig:
    """The configuration in `path`. Raises InvalidInput naming every wrong key and what was expected."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        wrong = FieldError("--config", "a readable JSON file", f"{path} ({error.strerror})")
        raise InvalidInput("no configuration", [wrong]) from error
    except ValueError as error:
        raise InvalidInput("no configuration", [FieldError(str(path), "JSON", str(error))]) from error
    try:
        return ControllerConfig.model_validate(data)
    except ValidationError as error:
        raise InvalidInput(f"{path} is not a valid configuration", wrong_fields(error)) from None
