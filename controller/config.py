"""The controller's configuration file: JSON, strict, every wrong key named before anything starts."""

from __future__ import annotations

import json
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from relight.controller.specs import ModelBody
from relight.controller.state.access import RedisConfig
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


class ServingTls(Closed):
    """PEM files of a server whose callers are told apart otherwise."""

    certificate: Path
    private_key: Path


class MetricsListen(Closed):
    """Where the API server finds external and custom metrics; TLS always, with a certificate for its Service's name."""

    host: str = "127.0.0.1"
    port: Port
    tls: ServingTls


class KubernetesConfig(Closed):
    """This controller keeps the resources and slot pods of a cluster, as one of several candidates."""

    kubeconfig: Path | None = None
    """How the API server is reached; absent: by the service account of this pod."""
    namespace: str
    """Where the lease of the election is."""
    lease: str = "relight-controller"
    lease_seconds: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)] = 15.0
    """After how long without a renewal another candidate may lead."""
    identity: Annotated[str, Field(max_length=253)] = ""
    """Of this candidate, for people; the host's name when absent. Each process adds a part of its own."""
    agent_image: Annotated[str, Field(min_length=1)]
    """Image of the agent in slot pods; it brings the supervisor and the plugin for the engine's container too."""
    controller_address: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
    """host:port at which agents in slot pods reach the controller's gRPC."""
    agent_secret: Annotated[str, Field(min_length=1, max_length=253)] = "relight-agent"  # noqa: S105 - a name
    """Name of the Secret with `agent.json` and its certificates, in each pool's namespace."""
    agent_tls_secret: Annotated[str, Field(max_length=253)] = ""
    """Where its certificates are a Secret apart (as cert-manager makes them): the name of that one."""
    serving_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Where slot pods answer requests for the model that is awake there."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] = 8001
    """Where agents in slot pods serve metrics."""
    metrics: MetricsListen | None = None
    """Serves what HorizontalPodAutoscalers follow (docs/scaling.md); absent: nowhere."""

    @field_validator("namespace", "lease")
    @classmethod
    def _named(cls, value: str) -> str:
        if not is_name(value):
            raise ValueError("must be lower-case letters, digits, '-' and '.'")
        return value


Endpoint = Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$", max_length=2048)]
"""The base URL of a collector of traces (OTLP over HTTP, as `http://127.0.0.1:4318`); empty for none."""


class ControllerConfig(Closed):
    """The whole file."""

    state_path: Path | None = None
    """File of the embedded store, for one controller on one machine."""
    redis: RedisConfig | None = None
    """The store of a cluster, in place of `state_path`."""
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

    kubernetes: KubernetesConfig | None = None
    """Absent: models come by REST and from this file, slots are whatever attaches."""
    external_scaler: Listen | None = None
    """Where KEDA asks how much is asked of models, by its external scaler protocol; absent: nowhere."""
    otlp_endpoint: Endpoint = ""
    """Where each finished start is sent as a trace; empty sends nothing."""

    @model_validator(mode="after")
    def _one_truth(self) -> ControllerConfig:
        if self.kubernetes and self.models:
            raise ValueError("with `kubernetes` models are ModelDeployments alone: leave `models` out")
        return self

    @model_validator(mode="after")
    def _one_store(self) -> ControllerConfig:
        if (self.state_path is None) == (self.redis is None):
            raise ValueError("give either `state_path` or `redis`")
        return self

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
